//! Streams that others made, work that is held up, and host functions.
//!
//! # Safety
//! A stream is alive while its [`Foreign`] or its [`StreamRef`] is; what is queued on it outlives it or is its own.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::{CUstream, CUstream_flags, CUstreamCaptureMode};
use cuvmm_driver::{Device, Driver};
use cuvmm_resource::{StreamOwner, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};

use super::Bench;

/// A stream in the primary context, made by hand; destroyed with this.
pub(crate) struct Foreign {
    device: Device,
    pub(crate) stream: CUstream,
    /// Run when it is dropped.
    pub(crate) last: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    pub(crate) dropped: Arc<AtomicUsize>,
}

impl Foreign {
    pub(crate) fn new(bench: &Bench, flags: CUstream_flags) -> Arc<Self> {
        let device = bench.device();
        // The share of the context that the stream lives by.
        device.primary_ctx_retain().unwrap();
        let stream = in_primary(&device, |driver| driver.stream_create(flags).unwrap());
        Arc::new(Self { device, stream, last: Mutex::default(), dropped: Arc::default() })
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(last) = self.last.get_mut().unwrap().take() {
            last();
        }
        self.dropped.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the stream and the share are this value's.
        unsafe { self.device.driver().stream_destroy(self.stream) }.unwrap();
        // SAFETY: as above.
        unsafe { self.device.primary_ctx_release() }.unwrap();
    }
}

// SAFETY: the stream is made with the value and destroyed with it.
unsafe impl StreamOwner for Foreign {
    fn driver(&self) -> &Driver {
        self.device.driver()
    }

    fn stream(&self) -> CUstream {
        self.stream
    }
}

/// With the device's primary context current.
pub(crate) fn in_primary<T>(device: &Device, work: impl FnOnce(&Driver) -> T) -> T {
    let driver = device.driver();
    let context = device.primary_ctx_retain().unwrap();
    // SAFETY: retained just now.
    unsafe { driver.ctx_push_current(context) }.unwrap();
    let done = work(driver);
    // SAFETY: it was pushed above.
    assert_eq!(unsafe { driver.ctx_pop_current() }.unwrap(), context);
    // SAFETY: the share is this function's.
    unsafe { device.primary_ctx_release() }.unwrap();
    done
}

/// Holds a stream up until told otherwise, at the latest when this is dropped.
pub(crate) struct Held(Option<Sender<()>>);

impl Held {
    /// Queues a host function on `stream` that waits, and work on the buffer behind it.
    pub(crate) fn queue(stream: CUstream, buffer: &VirtualMemoryBuffer) -> Self {
        unsafe extern "C" fn wait(receiver: *mut c_void) {
            // SAFETY: the pointer is a box that was leaked for this one call.
            let receiver = unsafe { Box::from_raw(receiver.cast::<Receiver<()>>()) };
            let _ = receiver.recv_timeout(Duration::from_secs(20));
        }
        let (sender, receiver) = channel::<()>();
        let data = Box::into_raw(Box::new(receiver)).cast();
        in_primary(buffer.resource().device(), |driver| {
            // SAFETY: the stream is alive, and the function takes the box that it is given.
            unsafe { driver.launch_host_func(stream, Some(wait), data) }.unwrap();
            // SAFETY: the range is the buffer's, which waits for the stream before it goes.
            unsafe { driver.memset_d8_async(buffer.address(), 7, buffer.size(), stream) }.unwrap();
        });
        Self(Some(sender))
    }

    /// Lets go of it after a while, on another thread.
    pub(crate) fn let_go_soon(mut self) -> std::thread::JoinHandle<()> {
        let sender = self.0.take();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            drop(sender);
        })
    }
}

/// Begins a capture on the stream that forbids what could be in its way, on whatever thread.
pub(crate) fn begin_capture(foreign: &Foreign) {
    // SAFETY: the stream is alive.
    unsafe { foreign.device.driver().stream_begin_capture(foreign.stream, CUstreamCaptureMode::GLOBAL) }.unwrap();
}

/// Ends the capture on the stream, and says whether nothing had killed it.
pub(crate) fn end_capture(foreign: &Foreign) -> bool {
    let driver = foreign.device.driver();
    // SAFETY: the stream is alive.
    match unsafe { driver.stream_end_capture(foreign.stream) } {
        // SAFETY: the graph is this function's.
        Ok(graph) => unsafe { driver.graph_destroy(graph) }.is_ok(),
        Err(_) => false,
    }
}

/// Whether all work on the stream is over.
pub(crate) fn is_done(stream: &StreamRef) -> bool {
    // SAFETY: the stream is alive while it is borrowed.
    unsafe { stream.driver().stream_query(stream.as_raw()) }.unwrap()
}

/// A default stream by its token.
pub(crate) fn token(bench: &Bench, token: CUstream) -> StreamRef {
    // SAFETY: a token names no stream that could go.
    unsafe { StreamRef::from_raw(&bench.driver, token) }.unwrap()
}

/// Runs `work` in a host function on the stream, and waits for that.
pub(crate) fn in_host_function(stream: &StreamRef, work: impl FnOnce() + Send + 'static) {
    type Work = Box<dyn FnOnce() + Send>;
    unsafe extern "C" fn run(work: *mut c_void) {
        // SAFETY: the pointer is a box that was leaked for this one call.
        let work = unsafe { Box::from_raw(work.cast::<Work>()) };
        work();
    }
    let work: Work = Box::new(work);
    let data = Box::into_raw(Box::new(work)).cast();
    // SAFETY: the stream is alive, and the function takes the box that it is given.
    unsafe { stream.driver().launch_host_func(stream.as_raw(), Some(run), data) }.unwrap();
    stream.synchronize().unwrap();
}

/// Waits until nothing of the resource is pending.
pub(crate) fn drain(resource: &VirtualMemoryResource) {
    resource.drain(Instant::now() + Duration::from_secs(30)).unwrap();
}
