//! [`Fence`]: work on some stream that the end of a buffer comes after.
//!
//! # Safety
//! A fence's event is alive until the fence is dropped. It is of its stream's context, which lives as long as the
//! stream, which the fence shares.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use cuvmm_driver::sys::CUevent;
use cuvmm_driver::{CUresult, Call, Driver, StrandedKind};

use crate::capture::{Session, is_capture_code, is_over};
use crate::error::Error;
use crate::settle::{Noted, Unsettled};
use crate::stream::StreamRef;

/// Work on some stream that is waited for.
#[derive(Debug)]
pub(crate) struct Fence {
    stream: StreamRef,
    /// Recorded behind the work; none: the whole stream is waited for.
    event: Option<CUevent>,
    /// Which of all records it is: later ones have higher numbers.
    record: u64,
}

/// The streams whose work was found not to be over in one round of questions, by the earliest record that tells so: what was
/// recorded on them later is not over either, and need not be asked for.
#[derive(Debug, Default)]
pub(crate) struct Busy(Vec<(StreamRef, u64)>);

impl Busy {
    fn has(&self, fence: &Fence) -> bool {
        self.0.iter().any(|(stream, record)| *stream == fence.stream && *record <= fence.record)
    }

    fn add(&mut self, fence: &Fence) {
        match self.0.iter_mut().find(|(stream, _)| *stream == fence.stream) {
            Some((_, record)) => *record = fence.record.min(*record),
            None => self.0.push((fence.stream.clone(), fence.record)),
        }
    }
}

impl Drop for Busy {
    /// Of a buffer that was given up in this round these may be the last shares.
    fn drop(&mut self) {
        self.0.drain(..).for_each(drop_alone);
    }
}

/// Drops a share of a stream, or what has one, and lets no panic out: owners of streams may panic, each of them, and two
/// panics that met would be the end of the process.
pub(crate) fn drop_alone<T>(value: T) {
    // What was panicked with may panic, too.
    catch_unwind(AssertUnwindSafe(|| drop(value))).unwrap_or_else(std::mem::forget);
}

impl Fence {
    /// All that is queued on a stream by the time that it is waited for.
    pub(crate) fn whole(stream: StreamRef) -> Self {
        Self { stream, event: None, record: 0 }
    }

    pub(crate) fn stream(&self) -> &StreamRef {
        &self.stream
    }

    /// Whether all of the stream is waited for, as long as no event is recorded.
    pub(crate) fn is_whole(&self) -> bool {
        self.event.is_none()
    }

    /// Makes it all of the stream again: of two fences on one, this covers both.
    pub(crate) fn widen(&mut self) {
        if let Some(event) = self.event.take() {
            // A failure was counted and reported.
            let _ = destroy(self.stream.driver(), event);
        }
    }

    /// As [`widen`](Self::widen), where nobody has looked whether the stream's context is still there.
    pub(crate) fn widen_unseen(&mut self) {
        if self.event.is_some() {
            let stream = self.stream.clone();
            let (session, _) = Session::enter(stream.target());
            if session.is_destroyed() {
                // So went the event.
                self.event = None;
            }
            self.widen();
        }
    }

    /// Records its event, or one that is made for it, behind all work queued so far. Where that fails it is as it was.
    pub(crate) fn record(&mut self, session: &Session<'_>) -> Result<(), cuvmm_driver::Error> {
        let event = self.event.map_or_else(|| session.create_event(), Ok)?;
        // SAFETY: the event is this fence's, or was made just now, in this stream's context.
        let recorded = unsafe { session.record(event) };
        if recorded.is_ok() {
            static RECORDS: AtomicU64 = AtomicU64::new(1);
            self.event = Some(event);
            self.record = RECORDS.fetch_add(1, Ordering::Relaxed);
        } else if self.event.is_none() {
            // A failure was counted and reported.
            let _ = destroy(self.stream.driver(), event);
        }
        recorded
    }

    /// Asks whether a capture began before the record. It would have the event, and a wait for that could never end well:
    /// then, and where that is not known, all of the stream is waited for instead.
    pub(crate) fn confirm(&mut self, session: &Session<'_>) -> Result<(), Error> {
        let is_captured = session.is_capturing();
        if !matches!(is_captured, Ok(false)) {
            self.widen();
        }
        if is_captured? { Err(Error::StreamCapturing) } else { Ok(()) }
    }

    /// Whether the work is over for sure.
    pub(crate) fn is_finished(&self) -> bool {
        let Some(event) = self.event else { return false };
        let (session, entered) = Session::enter(self.stream.target());
        // SAFETY: the event is this fence's, of this stream's context.
        entered.is_ok() && matches!(unsafe { session.query_event(event) }, Ok(true))
    }

    /// Refuses where the whole of a stream is waited for that is capturing. Waits for nothing.
    pub(crate) fn require_no_capture(&self, noted: &mut Noted) -> Result<(), Unsettled> {
        if self.event.is_some() {
            return Ok(());
        }
        let (session, entered) = Session::enter(self.stream.target());
        noted.note(entered);
        if session.is_gone() || session.is_lost() {
            return Ok(());
        }
        match require_not_capturing(&session, noted) {
            Ok(()) => noted.note(session.leave()),
            Err(Error::Driver(error)) => return Err(noted.refused(error)),
            Err(error) => return Err(Unsettled::Refused(error)),
        }
        Ok(())
    }

    /// Waits. Refused where the work may still be running. To be asked before: [`require_no_capture`](Self::require_no_capture).
    ///
    /// Where the stream's context can't be entered it waits all the same, if the stream can be named without: the work is not
    /// to be pulled away from for want of that.
    pub(crate) fn wait(&mut self, noted: &mut Noted) -> Result<(), Unsettled> {
        self.wait_after(noted, |_, _| Ok(()))
    }

    /// As [`require_no_capture`](Self::require_no_capture) and then [`wait`](Self::wait), in one session: where no other fence
    /// is to be asked in between.
    pub(crate) fn ask_and_wait(&mut self, noted: &mut Noted) -> Result<(), Unsettled> {
        if !self.is_whole() {
            return self.wait(noted);
        }
        self.wait_after(noted, require_not_capturing)
    }

    fn wait_after(
        &mut self,
        noted: &mut Noted,
        question: impl FnOnce(&Session<'_>, &mut Noted) -> Result<(), Error>,
    ) -> Result<(), Unsettled> {
        let is_whole = self.is_whole();
        let can = |session: &Session<'_>| !(is_whole && session.is_lost());
        let waited = self.attend(noted, can, |fence, session, noted| {
            question(session, noted)?;
            let waited = match fence.event {
                // SAFETY: the event is this fence's, of this stream's context.
                Some(event) => unsafe { session.synchronize_event(event) },
                None => session.synchronize(),
            };
            if has_event(&waited) {
                if session.is_capturing()? {
                    return Err(Error::StreamCapturing);
                }
                session.synchronize()?;
            } else {
                waited?;
            }
            Ok(true)
        });
        waited.map(drop)
    }

    /// Asks whether the work is over, and waits for nothing. Refused as [`wait`](Self::wait) is.
    ///
    /// A capture may begin at any time on a stream that somebody else has. A record there does no harm to it, and is found
    /// out; a query of the stream itself would be its end.
    pub(crate) fn poll(&mut self, noted: &mut Noted, busy: &mut Busy) -> Result<bool, Unsettled> {
        if !self.is_whole() && busy.has(self) {
            return Ok(false);
        }
        let is_over = self.ask(noted)?;
        if !is_over && !self.is_whole() {
            busy.add(self);
        }
        Ok(is_over)
    }

    fn ask(&mut self, noted: &mut Noted) -> Result<bool, Unsettled> {
        let never = |_: &Session<'_>| false;
        self.attend(noted, never, |fence, session, noted| {
            if fence.is_whole() {
                match session.is_capturing() {
                    Ok(true) => return Err(Error::StreamCapturing),
                    asked => noted.note(asked.map(drop)),
                }
                fence.record(session)?;
                fence.confirm(session)?;
            }
            let Some(event) = fence.event else { return Ok(false) };
            // SAFETY: the event is this fence's, of this stream's context.
            let asked = unsafe { session.query_event(event) };
            if asked.is_err() {
                // A capture may have it: then another is needed, and at any other time that tells as much.
                fence.widen();
            }
            if has_event(&asked) { Ok(false) } else { Ok(asked?) }
        })
    }

    /// Does `work`, a wait or a question, in the stream's context, and says whether the work behind the fence is over: also
    /// where that failed with a code that says so, or the context is gone. After any other failure it may still be running.
    ///
    /// `can` says whether it is done although the context could not be entered.
    fn attend(
        &mut self,
        noted: &mut Noted,
        can: impl FnOnce(&Session<'_>) -> bool,
        work: impl FnOnce(&mut Self, &Session<'_>, &mut Noted) -> Result<bool, Error>,
    ) -> Result<bool, Unsettled> {
        let stream = self.stream.clone();
        let (session, entered) = Session::enter(stream.target());
        if let Err(error) = entered {
            // With the driver went all of its contexts.
            if session.is_gone() || error.is_shut_down() {
                if session.is_destroyed() {
                    // So went the event.
                    self.event = None;
                }
                noted.note(Err(error));
                noted.note(session.leave());
                return Ok(true);
            }
            if !can(&session) {
                return Err(noted.refused(error));
            }
            noted.note(Err(error));
        }
        let is_over = match work(self, &session, noted) {
            Ok(is_over) => is_over,
            Err(Error::Driver(error)) if is_capture_code(error.code()) => {
                return Err(Unsettled::Refused(Error::StreamCapturing));
            }
            Err(Error::Driver(error)) if tells_of_end(&error) => {
                noted.note(Err(error));
                true
            }
            Err(Error::Driver(error)) => return Err(noted.refused(error)),
            Err(error) => return Err(Unsettled::Refused(error)),
        };
        noted.note(session.leave());
        Ok(is_over)
    }

    /// Destroys the event, and lets go of the stream, as dropping this does, and returns the error that dropping would only
    /// report.
    pub(crate) fn end(mut self) -> Result<(), cuvmm_driver::Error> {
        let destroyed = self.event.take().map_or(Ok(()), |event| destroy(self.stream.driver(), event));
        let stream = self.stream.clone();
        drop(self);
        destroyed.and(stream.end())
    }
}

/// Refuses a stream that is capturing, or of which nobody can tell: a wait would be the end of a capture. An answer that says
/// that the work is over is noted.
fn require_not_capturing(session: &Session<'_>, noted: &mut Noted) -> Result<(), Error> {
    match session.is_capturing() {
        Ok(true) => Err(Error::StreamCapturing),
        Err(error) if !is_over(error.code()) => Err(error.into()),
        asked => {
            noted.note(asked.map(drop));
            Ok(())
        }
    }
}

/// Whether a capture has the event that was asked for, which never says anything then: one that began before the record and
/// ended before it was asked whether there is one. A driver says of such an event that it is none, as it does of no other.
fn has_event<T>(asked: &Result<T, cuvmm_driver::Error>) -> bool {
    let code = asked.as_ref().err().and_then(cuvmm_driver::Error::code);
    matches!(code, Some(CUresult::CAPTURED_EVENT | CUresult::INVALID_VALUE))
}

/// Whether a failure says that the work is over. That no event can be made for want of a context says nothing of it.
fn tells_of_end(error: &cuvmm_driver::Error) -> bool {
    let is_of_event = error.call() == Some(Call::cuEventCreate)
        && matches!(error.code(), Some(CUresult::INVALID_CONTEXT | CUresult::INVALID_HANDLE));
    is_over(error.code()) && !is_of_event
}

fn destroy(driver: &Driver, event: CUevent) -> Result<(), cuvmm_driver::Error> {
    // SAFETY: the event was taken out of its fence, so this is the only time; it need not have completed.
    let result = unsafe { driver.event_destroy(event) };
    result.inspect_err(|error| driver.strand(StrandedKind::Other, error, "an event was not destroyed"))
}

impl Drop for Fence {
    fn drop(&mut self) {
        if let Some(event) = self.event.take()
            && self.stream.driver().may_drop("an event is kept")
        {
            // A failure was counted and reported.
            let _ = destroy(self.stream.driver(), event);
        }
    }
}
