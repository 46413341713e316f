//! Waits, queries and records beside captures: the one place that makes them.
//!
//! A wait, a query or a record can kill the stream capture of another thread, and a wait for a capturing stream
//! kills that capture itself. So each is made in a [`Session`]: with the thread's capture mode relaxed, in the
//! stream's own context, both restored after. Whether the stream is capturing is asked first.
//!
//! # Safety
//! A [`Target`]'s context and stream are alive while it is borrowed; that is the promise every call here needs.
#![allow(unsafe_code)]

use cuvmm_driver::sys::{CUcontext, CUevent, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use cuvmm_driver::{CUresult, Driver, Error};

use crate::stream::strand;

/// A stream to wait for or to queue on, and its context; both alive while this is borrowed.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    driver: &'a Driver,
    context: CUcontext,
    stream: CUstream,
}

impl<'a> Target<'a> {
    /// # Safety
    /// Context and stream are alive for `'a`, the stream is of that context, and both are of that driver.
    pub(crate) unsafe fn new(driver: &'a Driver, context: CUcontext, stream: CUstream) -> Self {
        Self { driver, context, stream }
    }

    /// The stream, for calls that queue work on it.
    pub(crate) fn stream(&self) -> CUstream {
        self.stream
    }
}

/// Whether the calling thread is inside a host function or a destructor of the driver's, where every CUDA call is
/// forbidden. Asked by one call without an effect, which is refused there, before anything that could wait: a wait
/// would not be refused but hang.
pub(crate) fn in_host_callback(driver: &Driver) -> Result<bool, Error> {
    match driver.ctx_get_current() {
        Ok(_) => Ok(false),
        Err(error) if error.code() == Some(CUresult::NOT_PERMITTED) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Whether a code says that a capture is in the way, so that nothing was waited for.
pub(crate) fn is_capture_code(code: Option<CUresult>) -> bool {
    code.is_some_and(|code| (CUresult::STREAM_CAPTURE_UNSUPPORTED.0..=CUresult::TIMEOUT.0).contains(&code.0))
}

/// The calling thread with its capture mode relaxed and the target's context current, until dropped.
pub(crate) struct Session<'a> {
    target: Target<'a>,
    previous: Option<CUstreamCaptureMode>,
    pushed: bool,
}

impl<'a> Session<'a> {
    /// Enters, and says what went wrong, if anything. Even then a wait can be tried: the work behind it is not to
    /// be pulled away from for want of a mode or a context.
    pub(crate) fn enter(target: Target<'a>) -> (Self, Result<(), Error>) {
        let mode = target.driver.thread_exchange_stream_capture_mode(CUstreamCaptureMode::RELAXED);
        // A default stream named by its token has no context of its own: it is the thread's current one's.
        let pushes = !target.context.is_null();
        // SAFETY: the target's context is alive.
        let pushed = if pushes { unsafe { target.driver.ctx_push_current(target.context) } } else { Ok(()) };
        let session = Self { target, previous: mode.as_ref().ok().copied(), pushed: pushes && pushed.is_ok() };
        (session, mode.map(drop).and(pushed))
    }

    /// Enters, or gives up.
    pub(crate) fn require(target: Target<'a>) -> Result<Self, Error> {
        let (session, entered) = Self::enter(target);
        entered.map(|()| session)
    }

    /// Whether the stream is capturing, or (the legacy default stream) involved in a capture.
    pub(crate) fn is_capturing(&self) -> Result<bool, Error> {
        // SAFETY: the target's stream is alive.
        match unsafe { self.target.driver.stream_is_capturing(self.target.stream) } {
            Ok(status) => Ok(status != CUstreamCaptureStatus::NONE),
            Err(error) if is_capture_code(error.code()) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Waits for all work queued on the stream so far. To be asked before: [`is_capturing`](Self::is_capturing).
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the target's stream is alive.
        unsafe { self.target.driver.stream_synchronize(self.target.stream) }
    }

    /// Makes an event in the target's context.
    pub(crate) fn create_event(&self) -> Result<CUevent, Error> {
        self.target.driver.event_create(cuvmm_driver::sys::CUevent_flags::DISABLE_TIMING)
    }

    /// Records an event behind all work queued on the stream so far.
    ///
    /// # Safety
    /// The event is alive and of the target's context.
    pub(crate) unsafe fn record(&self, event: CUevent) -> Result<(), Error> {
        // SAFETY: the target's stream is alive, and the caller vouches for the event.
        unsafe { self.target.driver.event_record(event, self.target.stream) }
    }

    /// Waits for what an event was recorded behind.
    ///
    /// # Safety
    /// The event is alive and of the target's context.
    pub(crate) unsafe fn synchronize_event(&self, event: CUevent) -> Result<(), Error> {
        // SAFETY: the caller vouches for the event.
        unsafe { self.target.driver.event_synchronize(event) }
    }
}

impl Session<'_> {
    /// Restores the thread's context and capture mode, as dropping this does, and says how that went.
    pub(crate) fn leave(mut self) -> Result<(), Error> {
        self.restore()
    }

    /// Goes on past a failure, which is counted and reported, and returns the first.
    fn restore(&mut self) -> Result<(), Error> {
        let driver = self.target.driver;
        let popped = if std::mem::take(&mut self.pushed) { driver.ctx_pop_current().map(drop) } else { Ok(()) };
        let restored = match self.previous.take() {
            Some(mode) => driver.thread_exchange_stream_capture_mode(mode).map(drop),
            None => Ok(()),
        };
        for error in [&popped, &restored].into_iter().filter_map(|result| result.as_ref().err()) {
            strand(driver, error, "the thread's context or capture mode is not restored");
        }
        popped.and(restored)
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        // A failure was counted and reported by `restore`.
        let _ = self.restore();
    }
}
