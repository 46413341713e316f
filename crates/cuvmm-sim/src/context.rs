//! Contexts: the devices' primary ones, and each thread's stack of them.

use std::collections::HashMap;
use std::thread::ThreadId;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::capture;
use crate::session::{Answer, Session};
use crate::state::{Ended, Mapping, State};
use crate::{map, reserve};

/// A primary context.
#[derive(Default)]
pub(crate) struct Context {
    pub(crate) device: i32,
    /// Whether it is still there to be used, or only does the work it has.
    pub(crate) alive: bool,
    /// What broke it, for good.
    pub(crate) error: Option<CUresult>,
    /// Its legacy default stream, once something used it.
    pub(crate) legacy: Option<u64>,
    /// The default streams of threads.
    pub(crate) per_thread: HashMap<ThreadId, u64>,
    peers: Vec<u64>,
}

/// A device's primary context.
#[derive(Default)]
pub(crate) struct Primary {
    pub(crate) context: Option<u64>,
    pub(crate) retains: usize,
    /// What broke a context of the device's. It outlives that: the process gets none any more.
    error: Option<CUresult>,
    /// The last contexts that were its, and are no more.
    gone: Ended,
}

impl State {
    /// Forgets what broke contexts that are gone.
    pub(crate) fn mend_devices(&mut self) {
        for primary in self.primaries.values_mut() {
            primary.error = None;
        }
    }
}

fn value_of(context: u64) -> CUcontext {
    CUcontext(std::ptr::without_provenance_mut(context as usize))
}

/// A context that somebody names.
pub(crate) fn named(session: &mut Session<'_>, context: CUcontext) -> Answer<u64> {
    let id = context.0.addr() as u64;
    match session.contexts.get(&id) {
        Some(found) if found.alive => Ok(id),
        Some(_) => Err(CUresult::CONTEXT_IS_DESTROYED),
        None if session.ended.contains(&id) => Err(CUresult::CONTEXT_IS_DESTROYED),
        None => {
            session.violation(format!("context {id:#x} is none"));
            Err(CUresult::INVALID_CONTEXT)
        }
    }
}

/// A context that somebody makes current.
fn to_be_current(session: &mut Session<'_>, context: CUcontext) -> Answer<u64> {
    match named(session, context) {
        Err(CUresult::CONTEXT_IS_DESTROYED) if session.policy.gone_contexts_made_current => Ok(context.0.addr() as u64),
        known => known,
    }
}

/// The current context; 201 without one, 709 where it is destroyed.
pub(crate) fn current(session: &mut Session<'_>) -> Answer<u64> {
    let thread = session.thread;
    let top = session.thread(thread).stack.last().copied().ok_or(CUresult::INVALID_CONTEXT)?;
    match session.contexts.get(&top) {
        Some(context) if context.alive => Ok(top),
        _ => Err(CUresult::CONTEXT_IS_DESTROYED),
    }
}

/// The current context, if it isn't broken.
pub(crate) fn working(session: &mut Session<'_>) -> Answer<u64> {
    let context = current(session)?;
    intact(session, context)?;
    Ok(context)
}

/// Answers what broke a context.
pub(crate) fn intact(session: &Session<'_>, context: u64) -> Answer {
    match session.contexts.get(&context).and_then(|context| context.error) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn device_exists(session: &Session<'_>, device: CUdevice) -> Answer {
    match session.shared.machine.device(device.0) {
        Some(_) => Ok(()),
        None => Err(CUresult::INVALID_DEVICE),
    }
}

pub(crate) fn primary_retain(session: &mut Session<'_>, device: CUdevice) -> Answer<CUcontext> {
    device_exists(session, device)?;
    let fresh = session.number();
    let primary = session.primaries.entry(device.0).or_default();
    if let Some(code) = primary.error {
        return Err(code);
    }
    primary.retains += 1;
    let id = *primary.context.get_or_insert(fresh);
    if id == fresh {
        let context = Context { device: device.0, alive: true, ..Context::default() };
        session.contexts.insert(id, context);
    }
    Ok(value_of(id))
}

pub(crate) fn primary_release(session: &mut Session<'_>, device: CUdevice) -> Answer {
    device_exists(session, device)?;
    match session.primaries.get_mut(&device.0) {
        Some(primary) if primary.retains > 0 => primary.retains -= 1,
        _ => return Err(CUresult::INVALID_CONTEXT),
    }
    if session.primaries.get(&device.0).is_some_and(|primary| primary.retains == 0) {
        destroy(session, device.0);
    }
    Ok(())
}

pub(crate) fn primary_state(session: &Session<'_>, device: CUdevice) -> Answer<(u32, i32)> {
    device_exists(session, device)?;
    let active = session.primaries.get(&device.0).is_some_and(|primary| primary.context.is_some());
    Ok((0, i32::from(active)))
}

/// Destroys the context, whoever retains it. Retains stay due; they are of the next one.
pub(crate) fn primary_reset(session: &mut Session<'_>, device: CUdevice) -> Answer {
    device_exists(session, device)?;
    destroy(session, device.0);
    Ok(())
}

/// Ends a device's primary context, after its work, with its streams, events and plain memory. Reservations,
/// physical memory and mappings are the process's, and stay.
fn destroy(session: &mut Session<'_>, device: i32) {
    let Some(id) = session.primaries.get_mut(&device).and_then(|primary| primary.context.take()) else { return };
    if let Some(context) = session.contexts.get_mut(&id) {
        context.alive = false;
    }
    session.wait_until_ended(|state| state.last_in(id));
    let streams: Vec<u64> =
        session.streams.iter().filter(|(_, stream)| stream.context == id).map(|(&stream, _)| stream).collect();
    for stream in streams {
        session.retire_stream(stream);
        session.ended.add(stream);
    }
    let events: Vec<u64> =
        session.events.iter().filter(|(_, event)| event.context == id).map(|(&event, _)| event).collect();
    for event in events {
        session.events.remove(&event);
        session.ended.add(event);
    }
    let modules: Vec<u64> =
        session.modules.iter().filter(|(_, module)| module.context == id).map(|(&module, _)| module).collect();
    for module in modules {
        session.modules.remove(&module);
        session.ended.add(module);
    }
    let made_here = |mapping: &Mapping| mapping.plain.is_some_and(|plain| plain.context == id);
    let plain: Vec<u64> =
        session.mappings.iter().filter(|(_, mapping)| made_here(mapping)).map(|(&start, _)| start).collect();
    for start in plain {
        map::remove(session, start);
        reserve::remove(session, start);
    }
    let error = session.contexts.remove(&id).and_then(|context| context.error);
    if let Some(primary) = session.primaries.get_mut(&device) {
        primary.error = primary.error.or(error);
        primary.gone.add(id);
    }
    session.ended.add(id);
    session.shared.changed.notify_all();
}

/// Destroys a context that somebody made: none, as the list has no call that makes one.
pub(crate) fn destroy_made(session: &mut Session<'_>, context: CUcontext) -> Answer {
    if context.is_null() {
        return Err(CUresult::INVALID_VALUE);
    }
    named(session, context)?;
    Err(CUresult::INVALID_CONTEXT)
}

pub(crate) fn get_current(session: &mut Session<'_>) -> Answer<CUcontext> {
    let thread = session.thread;
    Ok(session.thread(thread).stack.last().map_or(CUcontext::NULL, |&id| value_of(id)))
}

pub(crate) fn set_current(session: &mut Session<'_>, context: CUcontext) -> Answer {
    let id = if context.is_null() { None } else { Some(to_be_current(session, context)?) };
    let thread = session.thread;
    let stack = &mut session.thread(thread).stack;
    stack.pop();
    stack.extend(id);
    Ok(())
}

pub(crate) fn push(session: &mut Session<'_>, context: CUcontext) -> Answer {
    if context.is_null() {
        return Err(CUresult::INVALID_VALUE);
    }
    let id = to_be_current(session, context)?;
    let thread = session.thread;
    session.thread(thread).stack.push(id);
    Ok(())
}

pub(crate) fn pop(session: &mut Session<'_>) -> Answer<CUcontext> {
    let thread = session.thread;
    session.thread(thread).stack.pop().map(value_of).ok_or(CUresult::INVALID_CONTEXT)
}

pub(crate) fn device(session: &mut Session<'_>) -> Answer<CUdevice> {
    let refused = match current(session) {
        Ok(context) => return Ok(CUdevice(device_of(session, context))),
        Err(code) => code,
    };
    // A context that was made current although it is gone.
    let thread = session.thread;
    let Some(top) = session.thread(thread).stack.last().copied() else { return Err(refused) };
    let device = session.primaries.iter().find(|(_, primary)| primary.gone.contains(&top));
    device.map(|(&device, _)| CUdevice(device)).filter(|_| session.policy.gone_contexts_made_current).ok_or(refused)
}

pub(crate) fn device_of(session: &Session<'_>, context: u64) -> i32 {
    session.contexts.get(&context).map_or(-1, |context| context.device)
}

pub(crate) fn stream_context(session: &mut Session<'_>, stream: CUstream) -> Answer<CUcontext> {
    let (_, context) = session.working_stream(stream)?;
    Ok(value_of(context))
}

pub(crate) fn synchronize(session: &mut Session<'_>) -> Answer {
    let context = working(session)?;
    capture::refuse_context_wait(session, context)?;
    let last: Vec<u64> =
        session.streams.values().filter(|stream| stream.context == context).map(|stream| stream.last).collect();
    session.wait_until_ended(|state| state.unended(&last));
    intact(session, context)
}

pub(crate) fn enable_peer_access(session: &mut Session<'_>, peer: CUcontext, flags: u32) -> Answer {
    let context = working(session)?;
    let peer = named(session, peer)?;
    if flags != 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    let (here, there) = (device_of(session, context), device_of(session, peer));
    if peer == context || !session.shared.machine.reaches(here, there) {
        return Err(CUresult::PEER_ACCESS_UNSUPPORTED);
    }
    let peers = session.contexts.get_mut(&context).map(|context| &mut context.peers);
    match peers {
        Some(peers) if !peers.contains(&peer) => peers.push(peer),
        _ => return Err(CUresult::PEER_ACCESS_ALREADY_ENABLED),
    }
    Ok(())
}
