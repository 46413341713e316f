//! Streams: work in order, host functions in it, and capture into graphs.
//!
//! # Safety
//! Outputs are ours and read after success only; that handles are alive, and what host functions touch, is the
//! callers' promise.
#![allow(unsafe_code)]

use std::ffi::c_void;

use crate::driver::Driver;
use crate::error::Error;
use crate::raw::Call;
use crate::sys::*;

/// A stream's capture, as `cuStreamGetCaptureInfo` tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureInfo {
    /// Whether the stream captures.
    pub status: CUstreamCaptureStatus,
    /// The capture's id, unique in the process; 0 unless it is active.
    pub id: u64,
    /// The graph that is being captured into; null unless the capture is active. The capture owns it.
    pub graph: CUgraph,
}

impl Driver {
    /// `cuStreamCreate`: makes a stream in the current context.
    ///
    /// # Errors
    /// 201 without a current context.
    #[doc(alias = "cuStreamCreate")]
    pub fn stream_create(&self, flags: CUstream_flags) -> Result<CUstream, Error> {
        let mut stream = CUstream::NULL;
        // SAFETY: the output is ours.
        let code = unsafe { self.calls()?.cuStreamCreate(&raw mut stream, flags) };
        self.check(Call::cuStreamCreate, code)?;
        Ok(stream)
    }

    /// `cuStreamDestroy`: gives the stream up. Work that it was given still runs.
    ///
    /// # Safety
    /// `stream` is the caller's, and nobody uses it any more.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuStreamDestroy")]
    pub unsafe fn stream_destroy(&self, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the caller owns the stream.
        let code = unsafe { self.calls()?.cuStreamDestroy(stream) };
        self.check(Call::cuStreamDestroy, code)
    }

    /// `cuStreamSynchronize`: waits for all work that the stream was given.
    ///
    /// # Safety
    /// `stream` is alive and of this driver, or a default-stream token.
    ///
    /// # Errors
    /// 900 while something captures and the thread's mode forbids waiting, which breaks the capture; the failure
    /// of the work.
    #[doc(alias = "cuStreamSynchronize")]
    pub unsafe fn stream_synchronize(&self, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the caller vouches for the stream.
        let code = unsafe { self.calls()?.cuStreamSynchronize(stream) };
        self.check(Call::cuStreamSynchronize, code)
    }

    /// `cuStreamQuery`: whether all work that the stream was given is done.
    ///
    /// # Safety
    /// `stream` is alive and of this driver, or a default-stream token.
    ///
    /// # Errors
    /// As [`stream_synchronize`](Self::stream_synchronize).
    #[doc(alias = "cuStreamQuery")]
    pub unsafe fn stream_query(&self, stream: CUstream) -> Result<bool, Error> {
        // SAFETY: the caller vouches for the stream.
        let code = unsafe { self.calls()?.cuStreamQuery(stream) };
        self.check_ready(Call::cuStreamQuery, code)
    }

    /// `cuStreamIsCapturing`: whether the stream captures. Harms no capture.
    ///
    /// # Safety
    /// `stream` is alive and of this driver, or a default-stream token.
    ///
    /// # Errors
    /// 906 for the legacy default stream while a stream that it waits for captures.
    #[doc(alias = "cuStreamIsCapturing")]
    pub unsafe fn stream_is_capturing(&self, stream: CUstream) -> Result<CUstreamCaptureStatus, Error> {
        let mut status = CUstreamCaptureStatus::NONE;
        // SAFETY: the output is ours; the caller vouches for the stream.
        let code = unsafe { self.calls()?.cuStreamIsCapturing(stream, &raw mut status) };
        self.check(Call::cuStreamIsCapturing, code)?;
        Ok(status)
    }

    /// `cuStreamGetCaptureInfo`: the stream's capture, with the graph that it captures into.
    ///
    /// # Safety
    /// `stream` is alive and of this driver, or a default-stream token.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before CUDA 11.3; 906 as [`stream_is_capturing`](Self::stream_is_capturing).
    #[doc(alias = "cuStreamGetCaptureInfo")]
    pub unsafe fn stream_get_capture_info(&self, stream: CUstream) -> Result<CaptureInfo, Error> {
        let mut info = CaptureInfo::default();
        let (status, id, graph) = (&raw mut info.status, &raw mut info.id, &raw mut info.graph);
        let (dependencies, count) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the outputs are ours, and the last two may be left out; the caller vouches for the stream.
        let code = unsafe { self.calls()?.cuStreamGetCaptureInfo(stream, status, id, graph, dependencies, count) };
        self.check(Call::cuStreamGetCaptureInfo, code)?;
        Ok(info)
    }

    /// `cuStreamBeginCapture`: from now on the stream's work goes into a graph instead of running.
    ///
    /// # Safety
    /// `stream` is alive and of this driver, and no default-stream token for the legacy one.
    ///
    /// # Errors
    /// 1 for the legacy default stream or one that captures already.
    #[doc(alias = "cuStreamBeginCapture")]
    pub unsafe fn stream_begin_capture(&self, stream: CUstream, mode: CUstreamCaptureMode) -> Result<(), Error> {
        // SAFETY: the caller vouches for the stream.
        let code = unsafe { self.calls()?.cuStreamBeginCapture(stream, mode) };
        self.check(Call::cuStreamBeginCapture, code)
    }

    /// `cuStreamEndCapture`: ends the capture and gives the graph, which is the caller's to destroy.
    ///
    /// # Safety
    /// `stream` is alive and of this driver.
    ///
    /// # Errors
    /// 901 where the capture was broken, 904 where another stream has not joined it, 908 on another thread than
    /// the one that began it. In each case it is over, and there is no graph.
    #[doc(alias = "cuStreamEndCapture")]
    pub unsafe fn stream_end_capture(&self, stream: CUstream) -> Result<CUgraph, Error> {
        let mut graph = CUgraph::NULL;
        // SAFETY: the output is ours; the caller vouches for the stream.
        let code = unsafe { self.calls()?.cuStreamEndCapture(stream, &raw mut graph) };
        self.check(Call::cuStreamEndCapture, code)?;
        Ok(graph)
    }

    /// `cuThreadExchangeStreamCaptureMode`: sets how much captures forbid the calling thread, and gives what was
    /// set before, to be put back.
    ///
    /// # Errors
    /// 1 for an unknown mode.
    #[doc(alias = "cuThreadExchangeStreamCaptureMode")]
    pub fn thread_exchange_stream_capture_mode(&self, mode: CUstreamCaptureMode) -> Result<CUstreamCaptureMode, Error> {
        let mut exchanged = mode;
        // SAFETY: what is read and written is ours.
        let code = unsafe { self.calls()?.cuThreadExchangeStreamCaptureMode(&raw mut exchanged) };
        self.check(Call::cuThreadExchangeStreamCaptureMode, code)?;
        Ok(exchanged)
    }

    /// `cuStreamGetCtx`: the stream's context. For a default-stream token that is the current one.
    ///
    /// # Safety
    /// `stream` is alive and of this driver, or a default-stream token.
    ///
    /// # Errors
    /// 201 for a default-stream token without a current context.
    #[doc(alias = "cuStreamGetCtx")]
    pub unsafe fn stream_get_ctx(&self, stream: CUstream) -> Result<CUcontext, Error> {
        let mut context = CUcontext::NULL;
        // SAFETY: the output is ours; the caller vouches for the stream.
        let code = unsafe { self.calls()?.cuStreamGetCtx(stream, &raw mut context) };
        self.check(Call::cuStreamGetCtx, code)?;
        Ok(context)
    }

    /// `cuStreamWaitEvent`: makes the stream's later work wait for what `event` marks. The caller doesn't wait.
    ///
    /// # Safety
    /// `stream` and `event` are alive and of this driver; their devices may differ.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuStreamWaitEvent")]
    pub unsafe fn stream_wait_event(&self, stream: CUstream, event: CUevent) -> Result<(), Error> {
        // SAFETY: the caller vouches for both.
        let code = unsafe { self.calls()?.cuStreamWaitEvent(stream, event, 0) };
        self.check(Call::cuStreamWaitEvent, code)
    }

    /// `cuLaunchHostFunc`: queues `function(user_data)`, to run on a thread of the driver's. It is not run when
    /// the context has failed by then.
    ///
    /// # Safety
    /// `stream` is alive and of this driver, or a default-stream token; `function` may be called with `user_data`
    /// once, on any thread, until the stream's work is done (in a capture: whenever the graph is launched); it
    /// makes no CUDA call and doesn't unwind.
    ///
    /// # Errors
    /// 1 without a function.
    #[doc(alias = "cuLaunchHostFunc")]
    pub unsafe fn launch_host_func(
        &self,
        stream: CUstream,
        function: CUhostFn,
        user_data: *mut c_void,
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for the stream and the function.
        let code = unsafe { self.calls()?.cuLaunchHostFunc(stream, function, user_data) };
        self.check(Call::cuLaunchHostFunc, code)
    }
}
