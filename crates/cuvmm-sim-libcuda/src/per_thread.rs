//! The per-thread forms of calls: default streams are the thread's own. What a program finds that asks
//! cuGetProcAddress for them, or that looks for the names ending in `_ptsz` and `_ptds`.
//!
//! # Safety
//! Each form passes on what C passes it, with another name of the default stream.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;

use cuvmm_driver::sys::*;
use cuvmm_driver::{Call, Served, for_each_call};

use crate::library::Library;

/// A form that takes a stream: its null is the thread's own.
macro_rules! on_stream {
    ($export:literal $name:ident ($($arg:ident: $ty:ty),*)) => {{
        #[unsafe(export_name = $export)]
        #[allow(clippy::too_many_arguments, reason = "the driver's own signature")]
        unsafe extern "C" fn form($($arg: $ty),*) -> CUresult {
            // SAFETY: the C caller keeps the call's conditions.
            unsafe { Library::served().$name($(own($arg)),*) }
        }
        Some(form as unsafe extern "C" fn($($ty),*) -> CUresult as *const c_void)
    }};
}

/// A form that takes no stream and blocks: the call that does the same on a stream, and a wait for it.
macro_rules! blocking {
    ($export:literal $queued:ident ($($arg:ident: $ty:ty),*)) => {{
        #[unsafe(export_name = $export)]
        unsafe extern "C" fn form($($arg: $ty),*) -> CUresult {
            let driver = Library::served();
            // SAFETY: the C caller keeps the call's conditions until it has returned, which is after the work.
            let queued = unsafe { driver.$queued($($arg,)* CUstream::PER_THREAD) };
            if !queued.is_success() {
                return queued;
            }
            // SAFETY: a default stream is there always.
            unsafe { driver.cuStreamSynchronize(CUstream::PER_THREAD) }
        }
        Some(form as unsafe extern "C" fn($($ty),*) -> CUresult as *const c_void)
    }};
}

/// Which form a call has, and its exported name.
macro_rules! form_of {
    (cuStreamSynchronize $args:tt) => { on_stream!("cuStreamSynchronize_ptsz" cuStreamSynchronize $args) };
    (cuStreamQuery $args:tt) => { on_stream!("cuStreamQuery_ptsz" cuStreamQuery $args) };
    (cuStreamIsCapturing $args:tt) => { on_stream!("cuStreamIsCapturing_ptsz" cuStreamIsCapturing $args) };
    (cuStreamGetCaptureInfo $args:tt) => { on_stream!("cuStreamGetCaptureInfo_v2_ptsz" cuStreamGetCaptureInfo $args) };
    (cuStreamBeginCapture $args:tt) => { on_stream!("cuStreamBeginCapture_v2_ptsz" cuStreamBeginCapture $args) };
    (cuStreamEndCapture $args:tt) => { on_stream!("cuStreamEndCapture_ptsz" cuStreamEndCapture $args) };
    (cuStreamGetCtx $args:tt) => { on_stream!("cuStreamGetCtx_ptsz" cuStreamGetCtx $args) };
    (cuStreamGetDevice $args:tt) => { on_stream!("cuStreamGetDevice_ptsz" cuStreamGetDevice $args) };
    (cuStreamWaitEvent $args:tt) => { on_stream!("cuStreamWaitEvent_ptsz" cuStreamWaitEvent $args) };
    (cuLaunchHostFunc $args:tt) => { on_stream!("cuLaunchHostFunc_ptsz" cuLaunchHostFunc $args) };
    (cuEventRecord $args:tt) => { on_stream!("cuEventRecord_ptsz" cuEventRecord $args) };
    (cuMemcpyAsync $args:tt) => { on_stream!("cuMemcpyAsync_ptsz" cuMemcpyAsync $args) };
    (cuMemcpyHtoDAsync $args:tt) => { on_stream!("cuMemcpyHtoDAsync_v2_ptsz" cuMemcpyHtoDAsync $args) };
    (cuMemcpyDtoHAsync $args:tt) => { on_stream!("cuMemcpyDtoHAsync_v2_ptsz" cuMemcpyDtoHAsync $args) };
    (cuMemcpyDtoDAsync $args:tt) => { on_stream!("cuMemcpyDtoDAsync_v2_ptsz" cuMemcpyDtoDAsync $args) };
    (cuMemcpyPeerAsync $args:tt) => { on_stream!("cuMemcpyPeerAsync_ptsz" cuMemcpyPeerAsync $args) };
    (cuMemsetD8Async $args:tt) => { on_stream!("cuMemsetD8Async_ptsz" cuMemsetD8Async $args) };
    (cuMemsetD16Async $args:tt) => { on_stream!("cuMemsetD16Async_ptsz" cuMemsetD16Async $args) };
    (cuMemsetD32Async $args:tt) => { on_stream!("cuMemsetD32Async_ptsz" cuMemsetD32Async $args) };
    (cuGraphLaunch $args:tt) => { on_stream!("cuGraphLaunch_ptsz" cuGraphLaunch $args) };
    (cuLaunchKernel $args:tt) => { on_stream!("cuLaunchKernel_ptsz" cuLaunchKernel $args) };
    (cuMemcpy $args:tt) => { blocking!("cuMemcpy_ptds" cuMemcpyAsync $args) };
    (cuMemcpyHtoD $args:tt) => { blocking!("cuMemcpyHtoD_v2_ptds" cuMemcpyHtoDAsync $args) };
    (cuMemcpyDtoH $args:tt) => { blocking!("cuMemcpyDtoH_v2_ptds" cuMemcpyDtoHAsync $args) };
    (cuMemcpyDtoD $args:tt) => { blocking!("cuMemcpyDtoD_v2_ptds" cuMemcpyDtoDAsync $args) };
    (cuMemcpyPeer $args:tt) => { blocking!("cuMemcpyPeer_ptds" cuMemcpyPeerAsync $args) };
    (cuMemsetD8 $args:tt) => { blocking!("cuMemsetD8_v2_ptds" cuMemsetD8Async $args) };
    (cuMemsetD16 $args:tt) => { blocking!("cuMemsetD16_v2_ptds" cuMemsetD16Async $args) };
    (cuMemsetD32 $args:tt) => { blocking!("cuMemsetD32_v2_ptds" cuMemsetD32Async $args) };
    ($name:ident $arguments:tt) => { None };
}

macro_rules! forms {
    ($($kind:ident $name:ident $export:literal $version:literal $arguments:tt;)*) => {
        /// The per-thread form of a call, where it reads the default stream.
        pub(crate) fn form(call: Call) -> Option<*const c_void> {
            match call {
                $(Call::$name => form_of!($name $arguments),)*
                _ => None,
            }
        }
    };
}

for_each_call!(forms);

/// The argument; the thread's own stream for a null stream.
fn own<T: 'static>(mut argument: T) -> T {
    if let Some(stream) = (&mut argument as &mut dyn Any).downcast_mut::<CUstream>()
        && stream.is_null()
    {
        *stream = CUstream::PER_THREAD;
    }
    argument
}
