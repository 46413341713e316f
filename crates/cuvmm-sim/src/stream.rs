//! Streams: queues of numbered jobs, and what waits for them.
//!
//! Every job has a number that grows with submission. A job starts when the earlier ones of its stream have ended, and
//! those that its stream's kind, an event or its graph's last launch makes it wait for; as these all have lower numbers,
//! there is always one that can start.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, MutexGuard};
use std::thread::ThreadId;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::capture;
use crate::context::{self, intact};
use crate::session::{Answer, Session};
use crate::simulator::Shared;
use crate::state::State;
use crate::thread::{Callback, Running};
use crate::work::Work;

/// A stream.
pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) kind: Kind,
    /// Whether it waits for the legacy default stream, and that for it.
    pub(crate) blocking: bool,
    /// Jobs that have not ended, the running one included.
    pub(crate) queue: VecDeque<Job>,
    /// Whether the first of them runs.
    pub(crate) busy: bool,
    /// Whether a thread works for it.
    pub(crate) worker: bool,
    pub(crate) destroyed: bool,
    /// The number of the job that was submitted last.
    pub(crate) last: u64,
    pub(crate) capture: Option<capture::Part>,
    /// The nodes that a call named as what its next one comes after.
    pub(crate) dependencies: Vec<CUgraphNode>,
}

/// What a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Made,
    Legacy,
    PerThread,
}

/// Work on a stream.
pub(crate) struct Job {
    pub(crate) number: u64,
    pub(crate) work: Work,
    /// Done by the thread that submitted it, which waits for its turn.
    pub(crate) inline: bool,
}

impl Stream {
    /// The place in the queue behind all jobs up to this one.
    fn behind(&self, number: u64) -> usize {
        self.queue.partition_point(|job| job.number <= number)
    }

    /// The last job before this one of another stream's.
    fn last_before(&self, number: u64) -> Option<u64> {
        let before = self.behind(number).checked_sub(1)?;
        self.queue.get(before).map(|job| job.number)
    }
}

/// A job that has not ended.
pub(crate) struct Pending {
    stream: u64,
    /// The device addresses that it uses.
    pub(crate) spans: Vec<(u64, u64)>,
}

/// What a stream's worker is to do.
pub(crate) enum Step {
    Run(u64, Work),
    Wait,
    End,
}

impl State {
    /// Whether a job that has not ended uses an address of `start..end`.
    pub(crate) fn is_in_use(&self, start: u64, end: u64) -> bool {
        self.pending.values().flat_map(|pending| &pending.spans).any(|&(from, until)| from < end && start < until)
    }

    fn make_stream(&mut self, context: u64, kind: Kind, blocking: bool) -> u64 {
        let id = self.number();
        let stream = Stream {
            context,
            kind,
            blocking,
            queue: VecDeque::new(),
            busy: false,
            worker: false,
            destroyed: false,
            last: 0,
            capture: None,
            dependencies: Vec::new(),
        };
        self.streams.insert(id, stream);
        id
    }

    /// The stream that a token names in a context, once something used it.
    pub(crate) fn default_stream(&self, context: u64, thread: ThreadId, token: CUstream) -> Option<u64> {
        let context = self.contexts.get(&context)?;
        if token == CUstream::PER_THREAD { context.per_thread.get(&thread).copied() } else { context.legacy }
    }

    /// Whether a stream's first job may start.
    fn may_start(&self, stream: &Stream, job: &Job) -> bool {
        if job.work.after().is_some_and(|number| self.pending.contains_key(&number)) {
            return false;
        }
        let before = |other: &Stream| other.queue.front().is_some_and(|first| first.number < job.number);
        !self.rivals(stream).any(before)
    }

    /// Whether somebody may take a stream's first job now: whoever submitted it, or else anybody.
    fn can_take(&self, stream: &Stream, job: &Job, inline: bool) -> bool {
        !stream.busy && job.inline == inline && self.may_start(stream, job)
    }

    /// The legacy default stream of a context, once something used it.
    fn legacy_of(&self, context: u64) -> Option<&Stream> {
        let id = self.contexts.get(&context)?.legacy?;
        self.streams.get(&id)
    }

    /// By stream, the last of its jobs without whose end these can't end; they need all before it as well.
    pub(crate) fn reach(&self, jobs: &[u64]) -> BTreeMap<u64, u64> {
        let mut reach = BTreeMap::new();
        let mut open = jobs.to_vec();
        while let Some(number) = open.pop() {
            let Some(id) = self.pending.get(&number).map(|pending| pending.stream) else { continue };
            let Some(stream) = self.streams.get(&id) else { continue };
            let known = reach.get(&id).copied();
            if known.is_some_and(|known| number <= known) {
                continue;
            }
            reach.insert(id, number);
            let jobs = stream.behind(known.unwrap_or(0))..stream.behind(number);
            open.extend(stream.queue.range(jobs).filter_map(|job| job.work.after()));
            open.extend(self.rivals(stream).filter_map(|rival| rival.last_before(number)));
            if known.is_none() {
                // A host function that runs ends after what it waits for.
                let running = self.threads.values().flat_map(|thread| &thread.running);
                let here = running.filter(|running| running.callback == Callback::HostFunction(id));
                open.extend(here.flat_map(|running| &running.awaits));
            }
        }
        reach
    }

    /// The streams whose earlier jobs come before those of this one.
    fn rivals<'a>(&'a self, stream: &'a Stream) -> impl Iterator<Item = &'a Stream> {
        let legacy = if stream.kind != Kind::Legacy && stream.blocking { self.legacy_of(stream.context) } else { None };
        let is_legacy = stream.kind == Kind::Legacy;
        let others = is_legacy.then(|| self.streams.values()).into_iter().flatten();
        let blocking =
            others.filter(|other| other.context == stream.context && other.kind != Kind::Legacy && other.blocking);
        legacy.into_iter().chain(blocking)
    }

    /// Takes the first job that can start of those that lie within this reach.
    pub(crate) fn take_within(&mut self, reach: &BTreeMap<u64, u64>) -> Option<(u64, u64, Work)> {
        self.take_of(|id, number| reach.get(&id).is_some_and(|&last| number <= last))
    }

    /// Takes the first job of all that can start.
    pub(crate) fn take_first(&mut self) -> Option<(u64, u64, Work)> {
        self.take_of(|_, _| true)
    }

    /// Takes the first job that is wanted and can start.
    fn take_of(&mut self, is_wanted: impl Fn(u64, u64) -> bool) -> Option<(u64, u64, Work)> {
        let mut first: Option<(u64, u64)> = None;
        for (&id, stream) in &self.streams {
            if let Some(job) = stream.queue.front()
                && first.is_none_or(|(number, _)| job.number < number)
                && is_wanted(id, job.number)
                && self.can_take(stream, job, false)
            {
                first = Some((job.number, id));
            }
        }
        let (_, id) = first?;
        match self.step(id, false) {
            Step::Run(number, work) => Some((id, number, work)),
            Step::Wait | Step::End => None,
        }
    }

    /// Those of these jobs that have not ended.
    pub(crate) fn unended(&self, jobs: &[u64]) -> Vec<u64> {
        jobs.iter().copied().filter(|number| self.pending.contains_key(number)).collect()
    }

    /// The last jobs of a context's streams, where they have not ended: all others of its come before them.
    pub(crate) fn last_in(&self, context: u64) -> Vec<u64> {
        let streams = self.streams.values().filter(|stream| stream.context == context);
        streams.map(|stream| stream.last).filter(|last| self.pending.contains_key(last)).collect()
    }

    /// Breaks every context of the process for good that is not broken already: what fails on one device is fatal to
    /// those on others, too.
    pub(crate) fn break_contexts(&mut self, code: CUresult) {
        for context in self.contexts.values_mut() {
            context.error.get_or_insert(code);
        }
    }

    /// Takes the first job if `inline` says that it is the asking thread's and it may start.
    pub(crate) fn step(&mut self, id: u64, inline: bool) -> Step {
        let Some(stream) = self.streams.get(&id) else { return Step::End };
        match stream.queue.front() {
            None if stream.destroyed => Step::End,
            Some(job) if self.can_take(stream, job, inline) => {
                let (number, work) = (job.number, job.work.clone());
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.busy = true;
                }
                Step::Run(number, work)
            }
            _ => Step::Wait,
        }
    }

    /// Ends the running job.
    pub(crate) fn finish(&mut self, id: u64, number: u64) {
        self.pending.remove(&number);
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.queue.pop_front();
            stream.busy = false;
            if stream.destroyed && stream.queue.is_empty() && !stream.worker {
                self.streams.remove(&id);
            }
        }
    }

    /// Destroys a stream, which still does the work it has.
    pub(crate) fn retire_stream(&mut self, id: u64) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.destroyed = true;
        let part = stream.capture.take();
        if stream.queue.is_empty() && !stream.worker {
            self.streams.remove(&id);
        }
        if let Some(part) = part {
            self.abandon(id, &part);
        }
    }
}

impl Session<'_> {
    /// The stream that a call names: 0 and the tokens are default streams of the current context.
    pub(crate) fn stream(&mut self, stream: CUstream) -> Answer<u64> {
        if !stream.is_default_token() {
            let id = stream.0.addr() as u64;
            return match self.streams.get(&id) {
                Some(found) if !found.destroyed && found.kind == Kind::Made => Ok(id),
                _ if self.ended.contains(&id) => {
                    self.violation("a stream whose context is gone is used, which can crash a real driver");
                    Err(CUresult::CONTEXT_IS_DESTROYED)
                }
                _ => {
                    self.violation(format!("stream {id:#x} is not alive"));
                    Err(CUresult::INVALID_HANDLE)
                }
            };
        }
        let context = context::current(self)?;
        let thread = self.thread;
        if let Some(known) = self.default_stream(context, thread, stream) {
            return Ok(known);
        }
        let kind = if stream == CUstream::PER_THREAD { Kind::PerThread } else { Kind::Legacy };
        let id = self.make_stream(context, kind, true);
        if let Some(context) = self.contexts.get_mut(&context) {
            match kind {
                Kind::PerThread => drop(context.per_thread.insert(thread, id)),
                _ => context.legacy = Some(id),
            }
        }
        Ok(id)
    }

    /// The stream that a call names, and its context if that isn't broken. A stream that somebody made brings its
    /// context, so that none need be current.
    pub(crate) fn working_stream(&mut self, stream: CUstream) -> Answer<(u64, u64)> {
        let id = self.stream(stream)?;
        let context = self.streams.get(&id).ok_or(CUresult::INVALID_HANDLE)?.context;
        intact(self, context)?;
        Ok((id, context))
    }

    /// Queues a job; its number.
    pub(crate) fn enqueue(&mut self, id: u64, work: Work, spans: Vec<(u64, u64)>, inline: bool) -> Answer<u64> {
        let number = self.number();
        let shared = self.shared;
        let by_hand = shared.machine.manual_streams;
        let inline = inline && !by_hand;
        let stream = self.streams.get_mut(&id).ok_or(CUresult::INVALID_HANDLE)?;
        if !inline && !by_hand && !stream.worker {
            let (shared, id) = (shared.clone(), id);
            let spawned = std::thread::Builder::new().name("cuvmm-sim stream".into()).spawn(move || serve(&shared, id));
            spawned.map_err(|_| CUresult::OUT_OF_MEMORY)?;
            stream.worker = true;
        }
        stream.queue.push_back(Job { number, work, inline });
        stream.last = number;
        self.pending.insert(number, Pending { stream: id, spans });
        self.shared.changed.notify_all();
        Ok(number)
    }

    /// Takes back the job that was queued last, before anybody could take it.
    pub(crate) fn take_back(&mut self, id: u64) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let taken = stream.queue.pop_back();
        stream.last = stream.queue.back().map_or(0, |job| job.number);
        if let Some(job) = taken {
            self.pending.remove(&job.number);
        }
    }

    /// The jobs that a wait for this stream is a wait for.
    fn awaited(&self, id: u64) -> Vec<u64> {
        let Some(stream) = self.streams.get(&id) else { return Vec::new() };
        if stream.kind != Kind::Legacy {
            return vec![stream.last];
        }
        let also = |other: &Stream| other.context == stream.context && other.blocking;
        self.streams
            .iter()
            .filter(|(other_id, other)| **other_id == id || also(other))
            .map(|(_, other)| other.last)
            .collect()
    }

    /// Refuses what would never end: waiting, in a host function, for work that comes after it.
    fn refuse_own_stream(&mut self, awaited: &[u64]) -> Answer {
        let thread = self.thread;
        let own: Vec<u64> = self.thread(thread).running.iter().filter_map(Running::stream).collect();
        if own.is_empty() {
            return Ok(());
        }
        let reach = self.reach(awaited);
        if own.iter().any(|stream| reach.contains_key(stream)) {
            self.violation("a host function waits for its own stream, which hangs a real driver");
            return Err(CUresult::NOT_PERMITTED);
        }
        Ok(())
    }

    /// Waits, noting for which jobs if it is a host function that does.
    pub(crate) fn wait_for_all(&mut self, awaited: Vec<u64>) -> Answer {
        self.refuse_own_stream(&awaited)?;
        let thread = self.thread;
        if let Some(running) = self.thread(thread).running.last_mut() {
            running.awaits.clone_from(&awaited);
        }
        self.wait_until_ended(|state| state.unended(&awaited));
        if let Some(running) = self.thread(thread).running.last_mut() {
            running.awaits.clear();
        }
        Ok(())
    }
}

/// Does a stream's work until it is destroyed.
fn serve(shared: &Arc<Shared>, id: u64) {
    let mut state = shared.lock();
    loop {
        if state.stopped {
            return;
        }
        match state.step(id, false) {
            Step::Run(number, work) => state = perform(shared, state, id, number, &work),
            Step::Wait => state = shared.wait(state),
            Step::End => {
                state.streams.remove(&id);
                state.threads.remove(&std::thread::current().id());
                return;
            }
        }
    }
}

/// Does a job that was taken, and ends it. Meanwhile nobody has the lock, unless it is a kernel that looks where it is.
pub(crate) fn perform<'a>(
    shared: &'a Shared,
    mut state: MutexGuard<'a, State>,
    id: u64,
    number: u64,
    work: &Work,
) -> MutexGuard<'a, State> {
    let thread = std::thread::current().id();
    let context = state.streams.get(&id).map_or(0, |stream| stream.context);
    // Where streams are stepped by hand, a host function may do what it waits for.
    let outer = state.thread(thread).running.len();
    let ready = work.prepare(&mut state, id);
    drop(state);
    let ended = ready.run(shared, context);
    let mut state = shared.lock();
    state.thread(thread).running.truncate(outer);
    if let Err(code) = ended {
        state.break_contexts(code);
    }
    state.finish(id, number);
    shared.changed.notify_all();
    state
}

pub(crate) fn create(session: &mut Session<'_>, flags: CUstream_flags) -> Answer<CUstream> {
    let context = context::working(session)?;
    if flags.0 > 1 {
        return Err(CUresult::INVALID_VALUE);
    }
    let id = session.make_stream(context, Kind::Made, flags == CUstream_flags::DEFAULT);
    Ok(CUstream(std::ptr::without_provenance_mut(id as usize)))
}

pub(crate) fn destroy(session: &mut Session<'_>, stream: CUstream) -> Answer {
    if stream.is_default_token() {
        return Err(CUresult::INVALID_HANDLE);
    }
    let (id, _) = session.working_stream(stream)?;
    session.retire_stream(id);
    session.shared.changed.notify_all();
    Ok(())
}

pub(crate) fn synchronize(session: &mut Session<'_>, stream: CUstream) -> Answer {
    let (id, context) = session.working_stream(stream)?;
    capture::refuse_wait(session, Some(id))?;
    let awaited = session.awaited(id);
    session.wait_for_all(awaited)?;
    intact(session, context)
}

pub(crate) fn query(session: &mut Session<'_>, stream: CUstream) -> Answer {
    let (id, _) = session.working_stream(stream)?;
    capture::refuse_wait(session, Some(id))?;
    let awaited = session.awaited(id);
    if awaited.iter().any(|number| session.pending.contains_key(number)) {
        return Err(CUresult::NOT_READY);
    }
    Ok(())
}

pub(crate) fn device(session: &mut Session<'_>, stream: CUstream) -> Answer<CUdevice> {
    let (_, context) = session.working_stream(stream)?;
    Ok(CUdevice(context::device_of(session, context)))
}
