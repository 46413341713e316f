//! Stream captures: what they forbid others, what kills them, and the graphs that they end in.

use std::thread::ThreadId;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::graph::{self, Graph};
use crate::session::{Answer, Session};
use crate::state::State;
use crate::stream::Kind;
use crate::work::Work;

/// A capture that has not ended.
pub(crate) struct Capture {
    mode: CUstreamCaptureMode,
    thread: ThreadId,
    origin: u64,
    /// Whether it can still end well.
    active: bool,
    graph: u64,
}

/// A stream's, or an event's, place in a capture.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) capture: u64,
    /// The nodes that its next node comes after.
    after: Vec<u64>,
}

impl State {
    /// Ends the hope of a capture.
    pub(crate) fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.active = false;
        }
    }

    /// Ends a capture, which leaves no stream in it.
    fn end_capture(&mut self, capture: u64) -> Option<Capture> {
        for stream in self.streams.values_mut() {
            if stream.capture.as_ref().is_some_and(|part| part.capture == capture) {
                stream.capture = None;
            }
        }
        self.captures.remove(&capture)
    }

    /// Ends what a stream that goes away was capturing: nobody else can. One that only joined takes the hope.
    pub(crate) fn abandon(&mut self, stream: u64, part: &Part) {
        let Some(capture) = self.captures.get(&part.capture) else { return };
        if capture.origin != stream {
            return self.invalidate(part.capture);
        }
        if let Some(capture) = self.end_capture(part.capture) {
            self.graphs.remove(&capture.graph);
        }
    }

    fn is_active(&self, capture: u64) -> bool {
        self.captures.get(&capture).is_some_and(|capture| capture.active)
    }

    /// The captures that involve a context's legacy default stream: those on its blocking streams.
    fn involving_legacy(&self, context: u64) -> Vec<u64> {
        self.streams
            .values()
            .filter(|stream| stream.context == context && stream.blocking)
            .filter_map(|stream| stream.capture.as_ref())
            .map(|part| part.capture)
            .filter(|&capture| self.is_active(capture))
            .collect()
    }

    fn invalidate_all(&mut self, captures: &[u64]) {
        for &capture in captures {
            self.invalidate(capture);
        }
    }

    /// Adds a node behind all that the stream did in its capture.
    pub(crate) fn record(&mut self, stream: u64, work: Work) {
        let number = self.number();
        let Some(part) = self.streams.get_mut(&stream).and_then(|stream| stream.capture.as_mut()) else { return };
        let Some(capture) = self.captures.get(&part.capture) else { return };
        let Some(graph) = self.graphs.get_mut(&capture.graph) else { return };
        let after = std::mem::replace(&mut part.after, vec![number]);
        graph.record(number, work, after);
    }
}

/// The context whose legacy default stream this is.
fn legacy_of(session: &Session<'_>, stream: u64) -> Option<u64> {
    session.streams.get(&stream).filter(|stream| stream.kind == Kind::Legacy).map(|stream| stream.context)
}

/// Refuses, for a stream that is to get work, what a capture forbids; its place in a capture if it has one.
pub(crate) fn enter(session: &mut Session<'_>, stream: u64) -> Answer<Option<Part>> {
    if let Some(part) = session.streams.get(&stream).and_then(|stream| stream.capture.clone()) {
        return if session.is_active(part.capture) {
            Ok(Some(part))
        } else {
            Err(CUresult::STREAM_CAPTURE_INVALIDATED)
        };
    }
    refuse_legacy(session, stream)?;
    Ok(None)
}

/// Refuses, for a stream that is to get what no graph can have, a capture of its own, which is lost then.
pub(crate) fn enter_unrecorded(session: &mut Session<'_>, stream: u64) -> Answer {
    match enter(session, stream)? {
        Some(part) => {
            session.invalidate(part.capture);
            Err(CUresult::STREAM_CAPTURE_UNSUPPORTED)
        }
        None => Ok(()),
    }
}

/// Refuses work on a context's legacy default stream while captures involve that; they are lost then.
pub(crate) fn refuse_legacy(session: &mut Session<'_>, stream: u64) -> Answer {
    let Some(context) = legacy_of(session, stream) else { return Ok(()) };
    let involved = session.involving_legacy(context);
    session.invalidate_all(&involved);
    if involved.is_empty() { Ok(()) } else { Err(CUresult::STREAM_CAPTURE_IMPLICIT) }
}

/// Refuses a wait, or a query, that a capture forbids; the capture is lost then.
pub(crate) fn refuse_wait(session: &mut Session<'_>, stream: Option<u64>) -> Answer {
    if let Some(stream) = stream {
        let capture = session.streams.get(&stream).and_then(|stream| stream.capture.as_ref()).map(|part| part.capture);
        if let Some(capture) = capture {
            session.invalidate(capture);
            return Err(CUresult::STREAM_CAPTURE_UNSUPPORTED);
        }
        refuse_legacy(session, stream)?;
    }
    refuse_unsafe(session)
}

/// Refuses what a thread may not do while captures go on, by its mode and theirs; they are lost then.
pub(crate) fn refuse_unsafe(session: &mut Session<'_>) -> Answer {
    let thread = session.thread;
    let mode = session.thread(thread).mode;
    if mode == CUstreamCaptureMode::RELAXED {
        return Ok(());
    }
    let harmed: Vec<u64> = session
        .captures
        .iter()
        .filter(|(_, capture)| capture.active && capture.mode != CUstreamCaptureMode::RELAXED)
        .filter(|(_, capture)| {
            let global = mode == CUstreamCaptureMode::GLOBAL && capture.mode == CUstreamCaptureMode::GLOBAL;
            global || capture.thread == thread
        })
        .map(|(&id, _)| id)
        .collect();
    session.invalidate_all(&harmed);
    if harmed.is_empty() { Ok(()) } else { Err(CUresult::STREAM_CAPTURE_UNSUPPORTED) }
}

/// Refuses to wait for a whole context in which a stream captures, whatever the modes.
pub(crate) fn refuse_context_wait(session: &mut Session<'_>, context: u64) -> Answer {
    let captures: Vec<u64> = session
        .streams
        .values()
        .filter(|stream| stream.context == context)
        .filter_map(|stream| stream.capture.as_ref())
        .map(|part| part.capture)
        .filter(|&capture| session.is_active(capture))
        .collect();
    session.invalidate_all(&captures);
    if !captures.is_empty() {
        return Err(CUresult::STREAM_CAPTURE_UNSUPPORTED);
    }
    refuse_unsafe(session)
}

pub(crate) fn begin(session: &mut Session<'_>, stream: CUstream, mode: CUstreamCaptureMode) -> Answer {
    let (id, _) = session.working_stream(stream)?;
    if mode.0 > CUstreamCaptureMode::RELAXED.0 {
        return Err(CUresult::INVALID_VALUE);
    }
    if legacy_of(session, id).is_some() {
        return Err(CUresult::STREAM_CAPTURE_UNSUPPORTED);
    }
    if session.streams.get(&id).is_none_or(|stream| stream.capture.is_some()) {
        return Err(CUresult::ILLEGAL_STATE);
    }
    let (capture, graph) = (session.number(), session.number());
    let thread = session.thread;
    session.graphs.insert(graph, Graph::capturing());
    session.captures.insert(capture, Capture { mode, thread, origin: id, active: true, graph });
    if let Some(stream) = session.streams.get_mut(&id) {
        stream.capture = Some(Part { capture, after: Vec::new() });
    }
    Ok(())
}

/// Ends a capture. A lost one ends too, and one that another thread began: with a code, and no graph.
pub(crate) fn end(session: &mut Session<'_>, stream: CUstream) -> Answer<CUgraph> {
    let (id, _) = session.working_stream(stream)?;
    let part = session.streams.get(&id).and_then(|stream| stream.capture.clone()).ok_or(CUresult::ILLEGAL_STATE)?;
    let capture = session.captures.get(&part.capture).ok_or(CUresult::ILLEGAL_STATE)?;
    if capture.origin != id {
        session.invalidate(part.capture);
        return Err(CUresult::STREAM_CAPTURE_UNMATCHED);
    }
    let wrong_thread = capture.thread != session.thread && capture.mode != CUstreamCaptureMode::RELAXED;
    let (active, graph) = (capture.active, capture.graph);
    session.end_capture(part.capture);
    let joined = session.graphs.get(&graph).is_some_and(|graph| graph.is_joined(&part.after));
    let lost = match (active, wrong_thread, joined) {
        (false, _, _) => Some(CUresult::STREAM_CAPTURE_INVALIDATED),
        (_, true, _) => Some(CUresult::STREAM_CAPTURE_WRONG_THREAD),
        (_, _, false) => Some(CUresult::STREAM_CAPTURE_UNJOINED),
        (true, false, true) => None,
    };
    if let Some(code) = lost {
        session.graphs.remove(&graph);
        return Err(code);
    }
    if let Some(graph) = session.graphs.get_mut(&graph) {
        graph.capturing = false;
    }
    Ok(CUgraph(std::ptr::without_provenance_mut(graph as usize)))
}

/// What a stream's capture is.
pub(crate) struct Info {
    pub(crate) status: CUstreamCaptureStatus,
    pub(crate) number: u64,
    pub(crate) graph: CUgraph,
    /// The nodes that the stream's next one comes after, until a call changes that or asks again.
    pub(crate) dependencies: *const CUgraphNode,
    pub(crate) count: usize,
}

impl Default for Info {
    fn default() -> Self {
        let dependencies = std::ptr::null();
        Self { status: CUstreamCaptureStatus::NONE, number: 0, graph: CUgraph::NULL, dependencies, count: 0 }
    }
}

pub(crate) fn info(session: &mut Session<'_>, stream: CUstream) -> Answer<Info> {
    let (id, _) = session.working_stream(stream)?;
    if let Some(context) = legacy_of(session, id)
        && !session.involving_legacy(context).is_empty()
    {
        return Err(CUresult::STREAM_CAPTURE_IMPLICIT);
    }
    let part = session.streams.get(&id).and_then(|stream| stream.capture.clone());
    let Some(part) = part else { return Ok(Info::default()) };
    let Some(capture) = session.captures.get(&part.capture) else { return Ok(Info::default()) };
    let status = if capture.active { CUstreamCaptureStatus::ACTIVE } else { CUstreamCaptureStatus::INVALIDATED };
    let graph = CUgraph(std::ptr::without_provenance_mut(capture.graph as usize));
    let (number, count) = (part.capture, part.after.len());
    let named = part.after.into_iter().map(graph::value_of).collect();
    let mut dependencies = std::ptr::null();
    if let Some(stream) = session.streams.get_mut(&id)
        && count > 0
    {
        stream.dependencies = named;
        dependencies = stream.dependencies.as_ptr();
    }
    Ok(Info { status, number, graph, dependencies, count })
}

pub(crate) fn exchange_mode(session: &mut Session<'_>, mode: CUstreamCaptureMode) -> Answer<CUstreamCaptureMode> {
    if mode.0 > CUstreamCaptureMode::RELAXED.0 && !session.policy.unknown_capture_modes {
        return Err(CUresult::INVALID_VALUE);
    }
    let thread = session.thread;
    Ok(std::mem::replace(&mut session.thread(thread).mode, mode))
}

/// Makes a stream wait for an event as far as captures are concerned; whether that was all.
pub(crate) fn wait_event(session: &mut Session<'_>, stream: u64, event: u64) -> Answer<bool> {
    let part = enter(session, stream)?;
    let event = session.events.get(&event).ok_or(CUresult::INVALID_HANDLE)?;
    let recorded = event.last.is_some();
    let from = event.captured.clone().filter(|from| session.captures.contains_key(&from.capture));
    match (part, from) {
        (None, None) => Ok(false),
        (Some(_), None) if !recorded => Ok(true),
        (Some(part), None) => {
            session.invalidate(part.capture);
            Err(CUresult::STREAM_CAPTURE_ISOLATION)
        }
        (Some(part), Some(from)) if part.capture != from.capture => {
            session.invalidate_all(&[part.capture, from.capture]);
            Err(CUresult::STREAM_CAPTURE_MERGE)
        }
        (part, Some(from)) => {
            if !session.is_active(from.capture) {
                return Err(CUresult::STREAM_CAPTURE_INVALIDATED);
            }
            if legacy_of(session, stream).is_some() {
                session.invalidate(from.capture);
                return Err(CUresult::STREAM_CAPTURE_IMPLICIT);
            }
            let mut after = part.map(|part| part.after).unwrap_or_default();
            after.extend(from.after);
            after.sort_unstable();
            after.dedup();
            if let Some(stream) = session.streams.get_mut(&stream) {
                stream.capture = Some(Part { capture: from.capture, after });
            }
            Ok(true)
        }
    }
}
