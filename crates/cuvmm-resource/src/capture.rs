//! Waits, queries and records beside captures: the one place that makes them.
//!
//! A wait, a query or a record can kill the stream capture of another thread, and a wait for a capturing stream
//! kills that capture itself. So each is made in a [`Session`]: with the thread's capture mode relaxed, in the
//! stream's own context, both restored after. Whether the stream is capturing is asked first.
//!
//! # Safety
//! A [`Target`]'s context and stream are alive while it is borrowed; that is the promise every call here needs.
#![allow(unsafe_code)]

use std::time::Duration;

use cuvmm_driver::sys::{CUcontext, CUevent, CUgraph, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use cuvmm_driver::{CUresult, Driver, Error, StrandedKind};
use cuvmm_handles::PrimaryContext;

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

    /// The legacy default stream of a primary context.
    pub(crate) fn legacy(primary: &'a PrimaryContext) -> Self {
        // SAFETY: the context is alive while this share of it is, and has a legacy default stream.
        unsafe { Self::new(primary.device().driver(), primary.as_raw(), CUstream::LEGACY) }
    }
}

/// Whether a code says that a capture is in the way, so that nothing was waited for.
pub(crate) fn is_capture_code(code: Option<CUresult>) -> bool {
    code.is_some_and(|code| {
        (CUresult::STREAM_CAPTURE_UNSUPPORTED.0..=CUresult::STREAM_CAPTURE_WRONG_THREAD.0).contains(&code.0)
    })
}

/// Whether a code says that work waited for is over or lost: its context is broken or gone, and runs nothing any
/// more. After any other failure it may still be running.
pub(crate) fn is_over(code: Option<CUresult>) -> bool {
    const DEAD: [CUresult; 5] = [
        CUresult::NOT_INITIALIZED,
        CUresult::DEINITIALIZED,
        CUresult::INVALID_CONTEXT,
        CUresult::INVALID_HANDLE,
        CUresult::CONTEXT_IS_DESTROYED,
    ];
    // What work of one's own leaves behind, for every later call that waits for it: uncorrectable memory and link
    // errors, illegal addresses, timeouts, assertions, and the other faults of a kernel.
    code.is_some_and(|code| DEAD.contains(&code) || matches!(code.0, 214 | 220 | 700 | 702 | 710 | 714..=721))
}

/// The calling thread with its capture mode relaxed and the target's context current, until dropped.
pub(crate) struct Session<'a> {
    target: Target<'a>,
    previous: Option<CUstreamCaptureMode>,
    pushed: bool,
    /// Why the context could not be made current, where that says that it is broken or gone.
    gone: Option<CUresult>,
}

impl<'a> Session<'a> {
    /// Enters, and says what went wrong, if anything. Even then a wait can be tried, unless the stream is
    /// [only known by its context](Self::is_lost): the work behind it is not to be pulled away from for want of a mode.
    pub(crate) fn enter(target: Target<'a>) -> (Self, Result<(), Error>) {
        let mut session = Self { target, previous: None, pushed: false, gone: None };
        let mode = target.driver.thread_exchange_stream_capture_mode(CUstreamCaptureMode::RELAXED);
        let relaxed = mode.map(|mode| session.previous = Some(mode));
        let pushed = if target.context.is_null() {
            // A default stream named by its token has no context of its own: it is the thread's current one's.
            Ok(())
        } else {
            // SAFETY: the target's context is alive.
            unsafe { target.driver.ctx_push_current(target.context) }.map(|()| session.pushed = true)
        };
        session.gone = pushed.as_ref().err().and_then(Error::code).filter(|code| is_over(Some(*code)));
        (session, relaxed.and(pushed))
    }

    /// Whether the stream's context could not be made current because it is broken or gone, and with it the work.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.is_some()
    }

    /// Whether the stream's context is gone, and with it the stream and its events: a driver that is given those can crash.
    pub(crate) fn is_destroyed(&self) -> bool {
        self.gone == Some(CUresult::CONTEXT_IS_DESTROYED)
    }

    /// Whether the stream can't be named here: it is a default stream, and its context could not be made current.
    pub(crate) fn is_lost(&self) -> bool {
        self.target.stream.is_default_token() && !self.target.context.is_null() && !self.pushed
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

    /// The graph that the stream captures into; none where it does not, or where that can't end well any more.
    pub(crate) fn captured_graph(&self) -> Result<Option<CUgraph>, Error> {
        // SAFETY: the target's stream is alive.
        match unsafe { self.target.driver.stream_get_capture_info(self.target.stream) } {
            Ok(info) => Ok((info.status == CUstreamCaptureStatus::ACTIVE).then_some(info.graph)),
            Err(error) if is_capture_code(error.code()) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits for all work queued on the stream so far. To be asked before: [`is_capturing`](Self::is_capturing).
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the target's stream is alive.
        unsafe { self.target.driver.stream_synchronize(self.target.stream) }
    }

    /// As [`synchronize`](Self::synchronize), for work on what is borrowed until it is over. Where a wait fails although
    /// the work may go on, for a capture that began since it was queued or for any other reason, this waits again, once
    /// that capture has ended, and still returns the error.
    pub(crate) fn finish(&self) -> Result<(), Error> {
        let waited = self.synchronize();
        let code = waited.as_ref().err().and_then(Error::code);
        if waited.is_err() && !is_over(code) {
            while is_capture_code(code) && matches!(self.is_capturing(), Ok(true)) {
                std::thread::sleep(Duration::from_millis(1));
            }
            // What it says is no news: the first error is told.
            let _ = self.synchronize();
        }
        waited
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

    /// Whether what an event was recorded behind is over.
    ///
    /// # Safety
    /// The event is alive and of the target's context.
    pub(crate) unsafe fn query_event(&self, event: CUevent) -> Result<bool, Error> {
        // SAFETY: the caller vouches for the event.
        unsafe { self.target.driver.event_query(event) }
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
        // SAFETY: this undoes the push of `enter`; sessions nest.
        let pop = || unsafe { driver.ctx_pop_current() }.map(drop);
        let popped = if std::mem::take(&mut self.pushed) { pop() } else { Ok(()) };
        let restored = match self.previous.take() {
            Some(mode) => driver.thread_exchange_stream_capture_mode(mode).map(drop),
            None => Ok(()),
        };
        for error in [&popped, &restored].into_iter().filter_map(|result| result.as_ref().err()) {
            driver.strand(StrandedKind::Other, error, "the thread's context or capture mode is not restored");
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
