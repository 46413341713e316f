//! Events: places in a stream's queue, to be asked and waited for.

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::capture;
use crate::context::{self, intact};
use crate::session::{Answer, Session};
use crate::work::Work;

/// An event.
pub(crate) struct Event {
    pub(crate) context: u64,
    /// The job that records it.
    pub(crate) last: Option<u64>,
    /// The capture that it was recorded in, and where.
    pub(crate) captured: Option<capture::Part>,
}

/// The event that a call names.
fn named(session: &mut Session<'_>, event: CUevent) -> Answer<u64> {
    let id = event.0.addr() as u64;
    if session.events.contains_key(&id) {
        return Ok(id);
    }
    if session.ended.contains(&id) {
        session.violation("an event whose context is gone is used, which can crash a real driver");
        return Err(CUresult::INVALID_CONTEXT);
    }
    session.violation(format!("event {id:#x} is not alive"));
    Err(CUresult::INVALID_HANDLE)
}

pub(crate) fn create(session: &mut Session<'_>, flags: CUevent_flags) -> Answer<CUevent> {
    let context = context::working(session)?;
    let interprocess = flags.0 & CUevent_flags::INTERPROCESS.0 != 0;
    if flags.0 > 7 || (interprocess && flags.0 & CUevent_flags::DISABLE_TIMING.0 == 0) {
        return Err(CUresult::INVALID_VALUE);
    }
    let id = session.number();
    session.events.insert(id, Event { context, last: None, captured: None });
    Ok(CUevent(std::ptr::without_provenance_mut(id as usize)))
}

pub(crate) fn destroy(session: &mut Session<'_>, event: CUevent) -> Answer {
    let id = named(session, event)?;
    if let Some(context) = session.events.get(&id).map(|event| event.context) {
        intact(session, context)?;
    }
    session.events.remove(&id);
    Ok(())
}

pub(crate) fn record(session: &mut Session<'_>, event: CUevent, stream: CUstream) -> Answer {
    let event = named(session, event)?;
    let (id, context) = session.working_stream(stream)?;
    if session.events.get(&event).is_some_and(|event| event.context != context) {
        return Err(CUresult::INVALID_HANDLE);
    }
    let captured = capture::enter(session, id)?;
    let last = match captured {
        Some(_) => None,
        None => Some(session.enqueue(id, Work::Mark, Vec::new(), false)?),
    };
    if let Some(event) = session.events.get_mut(&event) {
        (event.last, event.captured) = (last, captured);
    }
    Ok(())
}

/// The job that an event waits for, if it may be asked.
fn asked(session: &mut Session<'_>, event: CUevent) -> Answer<(u64, Option<u64>)> {
    let id = named(session, event)?;
    let Some(event) = session.events.get(&id) else { return Err(CUresult::INVALID_HANDLE) };
    let (context, last, captured) = (event.context, event.last, event.captured.clone());
    intact(session, context)?;
    if let Some(part) = captured {
        if !session.captures.contains_key(&part.capture) {
            // That capture has ended.
            return Err(CUresult::INVALID_VALUE);
        }
        session.invalidate(part.capture);
        return Err(CUresult::CAPTURED_EVENT);
    }
    capture::refuse_wait(session, None)?;
    Ok((context, last.filter(|number| session.pending.contains_key(number))))
}

pub(crate) fn query(session: &mut Session<'_>, event: CUevent) -> Answer {
    match asked(session, event)? {
        (_, Some(_)) => Err(CUresult::NOT_READY),
        (_, None) => Ok(()),
    }
}

pub(crate) fn synchronize(session: &mut Session<'_>, event: CUevent) -> Answer {
    let (context, last) = asked(session, event)?;
    if let Some(number) = last {
        session.wait_for_all(vec![number])?;
    }
    intact(session, context)
}

pub(crate) fn wait(session: &mut Session<'_>, stream: CUstream, event: CUevent, flags: u32) -> Answer {
    let event = named(session, event)?;
    let (id, _) = session.working_stream(stream)?;
    if flags != 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    if capture::wait_event(session, id, event)? {
        return Ok(());
    }
    let last = session.events.get(&event).and_then(|event| event.last);
    match last.filter(|number| session.pending.contains_key(number)) {
        Some(number) => session.enqueue(id, Work::Wait { number }, Vec::new(), false).map(|_| ()),
        None => Ok(()),
    }
}
