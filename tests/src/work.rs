//! Work on streams: gates that a test opens, captures, host functions.
//!
//! # Safety
//! Streams live as long as what is queued on them, host functions own what they touch, and what is queued on a buffer
//! is waited for before the buffer goes: that is what the tests are about.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use cuvmm::driver::sys::{CUcontext, CUdeviceptr, CUgraph, CUstream, CUstream_flags, CUstreamCaptureMode};
use cuvmm::{Device, Driver, StreamOwner, StreamRef, VirtualMemoryBuffer};

/// How long a test waits for what should come at once.
const PATIENCE: Duration = Duration::from_secs(30);

/// The device's primary context, current on this thread until dropped.
pub struct Current {
    device: Device,
    /// The context.
    pub context: CUcontext,
    is_left_behind: bool,
}

impl Current {
    /// Makes it current.
    pub fn push(device: &Device) -> Self {
        let context = device.primary_ctx_retain().expect("a primary context");
        // SAFETY: it was retained just now.
        unsafe { device.driver().ctx_push_current(context) }.expect("a context to push");
        Self { device: device.clone(), context, is_left_behind: false }
    }

    /// Leaves the context current without a share of it: where nobody else has one, it is gone.
    pub fn leave_behind(mut self) {
        self.is_left_behind = true;
    }

    /// Pops what was [left behind](Self::leave_behind).
    pub fn forget(driver: &Driver) {
        // SAFETY: it was pushed, and nobody else pops it.
        unsafe { driver.ctx_pop_current() }.expect("a context to pop");
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if !self.is_left_behind {
            // SAFETY: `push` pushed it.
            unsafe { self.device.driver().ctx_pop_current() }.expect("a context to pop");
        }
        // SAFETY: it was retained by `push`, once.
        unsafe { self.device.primary_ctx_release() }.expect("a primary context to release");
    }
}

/// A stream made outside of the library, of either kind.
pub struct Stream {
    device: Device,
    stream: CUstream,
}

impl Stream {
    /// One that waits for the legacy default stream, which waits for it.
    pub fn blocking(device: &Device) -> StreamRef {
        Self::create(device, CUstream_flags::DEFAULT)
    }

    /// One that waits for no other.
    pub fn non_blocking(device: &Device) -> StreamRef {
        Self::create(device, CUstream_flags::NON_BLOCKING)
    }

    /// The default streams, by their tokens.
    pub fn tokens(driver: &Driver) -> [StreamRef; 3] {
        [CUstream::NULL, CUstream::LEGACY, CUstream::PER_THREAD].map(|token| {
            // SAFETY: a default stream is always there.
            unsafe { StreamRef::from_raw(driver, token) }.expect("a default stream")
        })
    }

    fn create(device: &Device, flags: CUstream_flags) -> StreamRef {
        device.primary_ctx_retain().expect("a primary context");
        let current = Current::push(device);
        let stream = device.driver().stream_create(flags).expect("a stream");
        drop(current);
        StreamRef::from_owner(Arc::new(Self { device: device.clone(), stream })).expect("a shared stream")
    }
}

// SAFETY: the stream is destroyed when the value is dropped, and is of the device's driver.
unsafe impl StreamOwner for Stream {
    fn driver(&self) -> &Driver {
        self.device.driver()
    }

    fn stream(&self) -> CUstream {
        self.stream
    }
}

// SAFETY: a stream may be used and destroyed by any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; nothing of it changes.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nobody shares it any more.
        unsafe { self.device.driver().stream_destroy(self.stream) }.expect("a stream to destroy");
        // SAFETY: it was retained when the stream was made, once.
        unsafe { self.device.primary_ctx_release() }.expect("a primary context to release");
    }
}

/// Holds up a stream, by a host function that returns when the gate opens, or after 30 seconds.
pub struct Gate {
    open: Arc<(Mutex<bool>, Condvar)>,
}

impl Gate {
    /// Puts a gate into a stream: what is queued behind it waits.
    pub fn close(stream: &StreamRef) -> Self {
        let open = Arc::new((Mutex::new(false), Condvar::new()));
        let user_data = Arc::into_raw(Arc::clone(&open)).cast_mut().cast::<c_void>();
        queue(stream, || {
            // SAFETY: the function takes over the share that it is given.
            unsafe { stream.driver().launch_host_func(stream.as_raw(), Some(wait), user_data) }
        });
        Self { open }
    }

    /// Lets the stream go on.
    pub fn open(&self) {
        *self.open.0.lock().unwrap() = true;
        self.open.1.notify_all();
    }

    /// Lets the stream go on after a while, and calls `meanwhile` at once.
    pub fn open_after<T>(&self, delay: Duration, meanwhile: impl FnOnce() -> T) -> T {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(delay);
                self.open();
            });
            meanwhile()
        })
    }

    /// Calls `waits`, which must return only when the stream has gone on, and so when the gate is opened a while
    /// later. What it did not wait for it would have found unfinished.
    #[track_caller]
    pub fn require_wait<T>(&self, stream: &StreamRef, waits: impl FnOnce() -> T) -> T {
        assert!(!is_idle(stream), "nothing to wait for");
        let (result, idle) = self.open_after(Duration::from_millis(60), || (waits(), is_idle(stream)));
        assert!(idle, "it did not wait");
        result
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

unsafe extern "C" fn wait(user_data: *mut c_void) {
    // SAFETY: `Gate::close` made this share of the flag for this one call.
    let open = unsafe { Arc::from_raw(user_data.cast::<(Mutex<bool>, Condvar)>()) };
    let guard = open.0.lock().unwrap();
    drop(open.1.wait_timeout_while(guard, PATIENCE, |open| !*open).unwrap());
}

/// Calls `work` in a host function of the stream, behind what is queued on it, and gives its result.
pub fn in_host_function<T: Send + 'static>(stream: &StreamRef, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    let work: Box<dyn FnOnce() + Send> = Box::new(move || drop(sender.send(work())));
    let user_data = Box::into_raw(Box::new(work)).cast::<c_void>();
    queue(stream, || {
        // SAFETY: the function takes over the closure that it is given.
        unsafe { stream.driver().launch_host_func(stream.as_raw(), Some(call), user_data) }
    });
    let result = receiver.recv_timeout(PATIENCE).expect("the end of a host function");
    stream.synchronize().expect("a stream that went on");
    result
}

unsafe extern "C" fn call(user_data: *mut c_void) {
    // SAFETY: it was made for this one call.
    let work = unsafe { Box::from_raw(user_data.cast::<Box<dyn FnOnce() + Send>>()) };
    work();
}

/// Calls `work` in the destructor of a user object, and gives its result.
pub fn in_destructor<T: Send + 'static>(device: &Device, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    let work: Box<dyn FnOnce() + Send> = Box::new(move || drop(sender.send(work())));
    let user_data = Box::into_raw(Box::new(work)).cast::<c_void>();
    let (driver, current) = (device.driver(), Current::push(device));
    // SAFETY: the function takes over the closure that it is given.
    let object = unsafe { driver.user_object_create(user_data, Some(call), 1) }.expect("a user object");
    // SAFETY: the reference was made just now.
    unsafe { driver.user_object_release(object, 1) }.expect("a user object to release");
    drop(current);
    receiver.recv_timeout(PATIENCE).expect("the end of a destructor")
}

/// Queues a fill of the whole buffer and does not wait for it, as a kernel of somebody else's.
pub fn queue_fill(stream: &StreamRef, buffer: &VirtualMemoryBuffer, value: u8) {
    queue(stream, || {
        // SAFETY: the buffer waits for the stream before it goes, or the test for both.
        unsafe { stream.driver().memset_d8_async(buffer.address(), value, buffer.size(), stream.as_raw()) }
    });
}

/// Queues a fill of the bytes at an address, by a driver that may be another one than the stream's own: one that knows the
/// same streams.
pub fn queue_fill_at(driver: &Driver, stream: &StreamRef, address: CUdeviceptr, bytes: usize, value: u8) {
    queue(stream, || {
        // SAFETY: whoever has memory there waits for the stream before it goes.
        unsafe { driver.memset_d8_async(address, value, bytes, stream.as_raw()) }
    });
}

/// Holds up a stream for a while, by such a driver: what is queued behind it waits.
pub fn hold_up(driver: &Driver, stream: &StreamRef, microseconds: usize) {
    unsafe extern "C" fn sleep(microseconds: *mut c_void) {
        std::thread::sleep(Duration::from_micros(microseconds.addr() as u64));
    }
    queue(stream, || {
        // SAFETY: the function takes a number for an address, and looks at nothing there.
        unsafe { driver.launch_host_func(stream.as_raw(), Some(sleep), std::ptr::without_provenance_mut(microseconds)) }
    });
}

/// Waits for all that is queued on a stream, by such a driver.
pub fn wait_for(driver: &Driver, stream: &StreamRef) {
    // SAFETY: the stream is alive.
    unsafe { driver.stream_synchronize(stream.as_raw()) }.expect("a stream that goes on");
}

pub(crate) fn queue(stream: &StreamRef, work: impl FnOnce() -> Result<(), cuvmm::driver::Error>) {
    in_context_of(stream, work).expect("work to queue");
}

/// Writes bytes at an address by the driver's own copy, and waits for that.
pub fn write_at(stream: &StreamRef, address: CUdeviceptr, bytes: &[u8]) -> Result<(), cuvmm::driver::Error> {
    in_context_of(stream, || {
        // SAFETY: the bytes are borrowed until the stream was waited for; addresses that can't be written are refused.
        unsafe { stream.driver().memcpy_htod_async(address, bytes.as_ptr().cast(), bytes.len(), stream.as_raw()) }
    })?;
    stream.synchronize().expect("a copy that ends");
    Ok(())
}

/// Reads bytes at an address by the driver's own copy, and waits for that.
pub fn read_at(stream: &StreamRef, address: CUdeviceptr, length: usize) -> Result<Vec<u8>, cuvmm::driver::Error> {
    let mut bytes = vec![0; length];
    in_context_of(stream, || {
        // SAFETY: the bytes are ours until the stream was waited for; addresses that can't be read are refused.
        unsafe { stream.driver().memcpy_dtoh_async(bytes.as_mut_ptr().cast(), address, length, stream.as_raw()) }
    })?;
    stream.synchronize().expect("a copy that ends");
    Ok(bytes)
}

/// Calls `work` with the stream's context current.
pub fn in_context_of<T>(stream: &StreamRef, work: impl FnOnce() -> T) -> T {
    let driver = stream.driver();
    // SAFETY: the stream is alive.
    let context = unsafe { driver.stream_get_ctx(stream.as_raw()) }.expect("a context");
    // SAFETY: the context lives as long as the stream.
    unsafe { driver.ctx_push_current(context) }.expect("a context to push");
    let result = work();
    // SAFETY: it was pushed above.
    unsafe { driver.ctx_pop_current() }.expect("a context to pop");
    result
}

/// Whether all work on the stream is done, asked beside whatever is captured.
pub fn is_idle(stream: &StreamRef) -> bool {
    let driver = stream.driver();
    let mode = driver.thread_exchange_stream_capture_mode(CUstreamCaptureMode::RELAXED).expect("a capture mode");
    let idle = in_context_of(stream, || {
        // SAFETY: the stream is alive.
        unsafe { driver.stream_query(stream.as_raw()) }
    });
    let _previous = driver.thread_exchange_stream_capture_mode(mode).expect("a capture mode");
    idle.expect("a stream without an error")
}

/// The modes of captures.
pub const MODES: [CUstreamCaptureMode; 3] =
    [CUstreamCaptureMode::GLOBAL, CUstreamCaptureMode::THREAD_LOCAL, CUstreamCaptureMode::RELAXED];

/// A capture that goes on on a stream.
pub struct Capture {
    stream: StreamRef,
    ended: bool,
}

impl Capture {
    /// Begins one, with a fill of `buffer` in it, which must outlive the capture but is never launched on.
    pub fn begin(stream: &StreamRef, mode: CUstreamCaptureMode, buffer: &VirtualMemoryBuffer) -> Self {
        queue(stream, || {
            // SAFETY: the stream is alive.
            unsafe { stream.driver().stream_begin_capture(stream.as_raw(), mode) }
        });
        queue_fill(stream, buffer, 0x77);
        Self { stream: stream.clone(), ended: false }
    }

    /// Ends it, which must go well: nothing killed it, and what was captured is there.
    #[track_caller]
    pub fn end(mut self) {
        let graph = self.end_now().expect("a capture that lived");
        assert!(!graph.is_null());
        // SAFETY: the graph is ours.
        unsafe { self.stream.driver().graph_destroy(graph) }.expect("a graph to destroy");
    }

    fn end_now(&mut self) -> Result<CUgraph, cuvmm::driver::Error> {
        self.ended = true;
        in_context_of(&self.stream, || {
            // SAFETY: the stream is alive.
            unsafe { self.stream.driver().stream_end_capture(self.stream.as_raw()) }
        })
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if !self.ended {
            // A test that failed leaves no capture to those that follow.
            let _ = self.end_now();
        }
    }
}
