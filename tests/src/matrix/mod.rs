//! The fault matrix: each driver call of an operation made to fail, with each code that the driver may answer.
//!
//! An operation on one of its paths is a [`Row`]. Its calls are recorded once; then, each time on a fresh [`Scene`], each
//! call fails with each of its [codes], before its effect, and with one code after it. Demanded is, unless the row
//! says otherwise and why, that
//! * the operation fails, and tells that call and that code;
//! * nothing is left but what the failing call itself made, or did not undo;
//! * the input is as it was, with its bytes, grows, and closes.

mod codes;
mod scene;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::{iter, thread};

use cuvmm::{CUresult, Call, Error, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::faults::When;

use crate::backend::{Backend, Left};
use crate::conformance::REPORT;
use crate::step::{Step, steps};

pub use codes::{codes, sample};
pub use scene::Scene;

/// How often an operation is done whose questions whether work is over may be few or many: the fewest count.
const RECORDINGS: usize = 8;
/// How often such an operation is tried until it asks as often as it did once.
const TRIES: usize = 100;

/// An operation on one of its paths.
pub struct Row {
    /// What it is called.
    pub operation: &'static str,
    /// Which way it takes.
    pub path: &'static str,
    /// Makes what it works on.
    pub set_up: fn(&Backend) -> Scene,
    /// Does it. A buffer that it takes out of the scene and gets back it puts back.
    pub operate: fn(&mut Scene) -> Result<Option<VirtualMemoryBuffer>, Error>,
    /// What is otherwise than everywhere, and the reason why.
    pub exception: fn(Failing) -> Option<Verdict>,
}

/// A failure that is about to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failing {
    /// Which call.
    pub step: Step,
    /// What it answers.
    pub code: CUresult,
    /// Whether it takes effect.
    pub when: When,
}

/// What becomes of an operation one of whose calls fails.
#[derive(Clone, Copy, Debug)]
pub enum Verdict {
    /// It fails, and tells the call and the code.
    Told,
    /// It goes another way, and succeeds.
    Overcome,
    /// It can't tell, as nothing that is dropped can.
    Silent,
    /// It fails, and says what that means instead of how the driver put it.
    As(fn(&cuvmm_resource::Error) -> bool),
    /// The code is an answer: it goes on with that and succeeds, or fails and says what it means.
    Answered(fn(&cuvmm_resource::Error) -> bool),
}

/// For rows without an exception.
pub fn none(_: Failing) -> Option<Verdict> {
    None
}

impl Row {
    /// Makes each call fail, and says how many cases that was.
    fn fail_each(&self, backend: &Backend) -> Counts {
        let steps = self.record(backend);
        assert!(!steps.is_empty(), "{self} makes no call");
        let is_polling = polls(&steps);
        let mut counts = Counts { calls: steps.len(), codes: BTreeSet::new(), cases: 0, missed: 0 };
        for (step, takes_effect) in steps {
            let before = if backend.is_gpu() { sample(step.call) } else { codes(step.call) };
            let mut failures: Vec<(CUresult, When)> = before.into_iter().map(|code| (code, When::Before)).collect();
            // A question has no effect to fail after; and where work is not over yet, it does not succeed.
            if takes_effect && step.call != Call::cuEventQuery && !backend.is_gpu() {
                failures.push((CUresult::UNKNOWN, When::After));
            }
            for (code, when) in failures {
                let failing = Failing { step, code, when };
                let came_up = (0..TRIES).any(|_| self.fail(backend, failing));
                // How often it is asked whether work is over hangs on how soon that is: only the first time is sure to come.
                if !came_up && is_polling && step.nth > 1 {
                    counts.missed += 1;
                    continue;
                }
                assert!(came_up, "{}: it was not called", self.case(failing));
                counts.codes.insert(code.0);
                counts.cases += 1;
            }
        }
        counts
    }

    /// The calls that it makes, and which of them succeed: where it asks whether work is over, as few as come up.
    fn record(&self, backend: &Backend) -> Vec<(Step, bool)> {
        let mut fewest = self.record_once(backend);
        if polls(&fewest) {
            for _ in 1..RECORDINGS {
                let steps = self.record_once(backend);
                fewest = if steps.len() < fewest.len() { steps } else { fewest };
            }
        }
        fewest
    }

    /// Those that put an answer into words change nothing else.
    fn record_once(&self, backend: &Backend) -> Vec<(Step, bool)> {
        let mark = backend.mark();
        let mut scene = (self.set_up)(backend);
        let before = backend.ledger.total();
        let (steps, result) = steps(backend, || self.operate(&mut scene));
        let results = backend.ledger.log_since(before).into_iter().map(|made| made.result.is_success());
        let mut steps: Vec<(Step, bool)> = steps.into_iter().zip(results).collect();
        steps.retain(|(step, _)| !matches!(step.call, Call::cuGetErrorName | Call::cuGetErrorString));
        let made = result.unwrap_or_else(|error| panic!("{self} failed by itself: {error}"));
        scene.require_intact(made.as_ref(), true, &format!("{self}, without a failure"));
        scene.end_graphs(0);
        scene.close(made).unwrap_or_else(|error| panic!("{self}: {error}"));
        backend.require_unchanged(&mark);
        steps
    }

    /// On a thread of its own, whose context and capture mode may stay changed.
    fn operate(&self, scene: &mut Scene) -> Result<Option<VirtualMemoryBuffer>, Error> {
        thread::scope(|scope| scope.spawn(|| (self.operate)(scene)).join()).expect("an operation that ends")
    }

    fn case(&self, Failing { step, code, when }: Failing) -> String {
        format!("{self}: {} number {} answers {code} {when:?} its effect", step.call, step.nth)
    }

    /// Whether it came up. Where work is over sooner than another time, it does not.
    fn fail(&self, backend: &Backend, failing: Failing) -> bool {
        let Failing { step, code, when } = failing;
        let case = self.case(failing);
        // A ledger hears of a call when it is over, and of another thread's that may be after its effect was seen.
        backend.let_go();
        let (before, at_start) = (backend.mark(), backend.ledger.live());
        let mut scene = (self.set_up)(backend);
        let at_work = backend.ledger.live();
        let (fired, calls) = (backend.faults.fired(), backend.ledger.total());
        backend.faults.fail(step.call, step.nth, code, when);
        let result = self.operate(&mut scene);
        backend.faults.clear();
        if backend.faults.fired() == fired {
            let polls = backend.ledger.log_since(calls).iter().any(|made| made.call == Call::cuEventQuery);
            assert!(polls, "{case}: it was not called");
            let made = result.unwrap_or_else(|error| panic!("{self} failed by itself: {error}"));
            scene.end_graphs(0);
            scene.close(made).unwrap_or_else(|error| panic!("{self}: {error}"));
            backend.require_unchanged(&before);
            return false;
        }

        let verdict = (self.exception)(failing).or_else(|| translated(failing)).unwrap_or(Verdict::Told);
        let made = require_verdict(verdict, failing, result, &case);
        let mut expected = left(failing);
        let now = backend.ledger.live();
        // What was dropped is let go of all the same, later, unless the driver says that it has shut down.
        let tears_down = matches!(step.call, Call::cuMemUnmap | Call::cuMemRelease | Call::cuMemAddressFree);
        let is_kept_whole = matches!(verdict, Verdict::Silent) && code == CUresult::DEINITIALIZED && !tears_down;
        if is_kept_whole {
            expected = expected.plus(scene.whole());
        } else if made.is_none() && !scene.is_used_up() && !scene.is_resized {
            assert_eq!(now.mappings, at_work.mappings + expected.mappings, "{case}: mappings");
            assert_eq!(now.allocations, at_work.allocations + expected.allocations, "{case}: references");
            let lost = now.reservations - at_work.reservations;
            assert!(lost <= expected.reservations, "{case}: {lost} reservations were left");
        }
        // What is mapped behind the library's back is in the way of a grow, and of giving back the addresses around it.
        let is_in_the_way = expected.mappings > 0 && when == When::After;
        scene.require_intact(made.as_ref(), !is_in_the_way, &case);
        // What is referred to for good has its share of the memory for good.
        let is_shared_for_good = step.call == Call::cuUserObjectRelease && when == When::Before;
        if is_shared_for_good {
            expected = expected.plus(scene.whole());
        }
        scene.end_graphs(usize::from(is_shared_for_good));
        let resources = scene.counting_resources();
        match scene.close(made) {
            Err(error) if is_in_the_way => assert_eq!(error.call(), Some(Call::cuMemAddressFree), "{case}: {error}"),
            closed => closed.unwrap_or_else(|error| panic!("{case}: then closing failed: {error}")),
        }
        // Let go of now: a resource that lives has a stream of its own.
        let is_counted = counted(resources);
        // What is told to have gone with its context is given to no driver again.
        let is_told_gone = step.call == Call::cuCtxPushCurrent && code == CUresult::CONTEXT_IS_DESTROYED;
        if is_kept_whole || is_told_gone {
            // And with it whatever it was to wait for.
            backend.let_go();
            let now = backend.ledger.live();
            let gone = (now.events - at_start.events, now.streams - at_start.streams);
            assert!(is_kept_whole || matches!(gone, (0, _) | (_, 0)), "{case}: {gone:?} of one context's are left");
            expected.events = now.events - at_start.events;
            expected.streams = now.streams - at_start.streams;
            if is_kept_whole {
                expected.contexts = now.contexts - at_start.contexts;
            }
        }
        backend.require_left_by(&before, expected, &case);
        // What is tried out while a resource is made is nobody's.
        if let Some(is_counted) = is_counted.filter(|_| self.operation != "new") {
            let when = if is_kept_whole { When::Before } else { when };
            let still_counted = still_counted(Failing { when, ..failing }, expected);
            assert_eq!(is_counted, still_counted, "{case}: what the statistics say is left");
        }
        true
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {}", self.operation, self.path)
    }
}

/// Whether it asks if work is over, and again if it is not.
fn polls(steps: &[(Step, bool)]) -> bool {
    steps.iter().any(|(step, _)| step.call == Call::cuEventQuery)
}

/// Demands the right result; what it made, where it succeeded.
fn require_verdict(
    verdict: Verdict,
    failing: Failing,
    result: Result<Option<VirtualMemoryBuffer>, Error>,
    case: &str,
) -> Option<VirtualMemoryBuffer> {
    let Failing { step, code, .. } = failing;
    let error = match (verdict, result) {
        (Verdict::Overcome | Verdict::Silent, result) => {
            return result.unwrap_or_else(|error| panic!("{case}: it failed: {error}"));
        }
        (Verdict::Answered(_), Ok(made)) => return made,
        (_, result) => result.err().unwrap_or_else(|| panic!("{case}: nothing noticed")),
    };
    match (verdict, &error) {
        (Verdict::As(is_meant) | Verdict::Answered(is_meant), Error::Resource(error)) => {
            assert!(is_meant(error), "{case}: {error}");
        }
        (Verdict::As(_) | Verdict::Answered(_), error) => panic!("{case}: {error}"),
        _ => {
            assert_eq!((error.call(), error.code()), (Some(step.call), Some(code)), "{case}: {error}");
            assert!(chain(&error).contains(&step.call.to_string()), "{case}: {error}");
        }
    }
    None
}

/// The messages of an error and of what caused it.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let _ = write!(text, ": {cause}");
        source = cause.source();
    }
    text
}

/// What is told in words of its own, by whatever operation makes the call.
fn translated(failing: Failing) -> Option<Verdict> {
    use cuvmm_resource::Error as Resource;
    let captures = CUresult::STREAM_CAPTURE_UNSUPPORTED.0..=CUresult::STREAM_CAPTURE_WRONG_THREAD.0;
    match failing.step.call {
        // The question whether the thread is in a host function.
        Call::cuCtxGetCurrent if failing.code == CUresult::NOT_PERMITTED => {
            Some(Verdict::As(|error| matches!(error, Resource::HostCallback)))
        }
        Call::cuStreamGetCaptureInfo if captures.contains(&failing.code.0) => {
            Some(Verdict::As(|error| matches!(error, Resource::NotCapturing)))
        }
        // A capture that is over has the event: the stream is waited for instead.
        Call::cuStreamSynchronize | Call::cuEventSynchronize | Call::cuEventQuery
            if failing.code == CUresult::CAPTURED_EVENT =>
        {
            Some(Verdict::Overcome)
        }
        Call::cuStreamIsCapturing | Call::cuStreamSynchronize | Call::cuEventSynchronize | Call::cuEventQuery
            if captures.contains(&failing.code.0) =>
        {
            Some(Verdict::As(|error| matches!(error, Resource::StreamCapturing)))
        }
        // So answers a driver that is older than the attribute.
        Call::cuDeviceGetAttribute if failing.code == CUresult::INVALID_VALUE => {
            Some(Verdict::As(|error| matches!(error, Resource::Unsupported { .. })))
        }
        _ => None,
    }
}

/// What a failing call leaves: what it made and nobody knows of, or did not undo.
fn left(failing: Failing) -> Left {
    let Failing { step, code, when } = failing;
    let none = Left::default();
    // Of a driver that has shut down nothing is counted.
    let stranded = usize::from(code != CUresult::DEINITIALIZED);
    match (when, step.call) {
        (When::Before, Call::cuMemUnmap) => Left { mappings: 1, reservations: 1, stranded, ..none },
        (When::Before, Call::cuMemRelease) => Left { allocations: 1, stranded, ..none },
        (When::Before, Call::cuMemAddressFree) => Left { reservations: 1, stranded, ..none },
        (When::Before, Call::cuEventDestroy) => Left { events: 1, stranded, ..none },
        (When::Before, Call::cuDevicePrimaryCtxRelease) => Left { contexts: 1, stranded, ..none },
        (When::Before, Call::cuUserObjectRelease) => Left { user_objects: 1, stranded, ..none },
        (When::After, Call::cuUserObjectRelease) => Left { stranded: 1, ..none },
        // Nobody is told which it is, so that its destructor never runs.
        (When::After, Call::cuUserObjectCreate) => Left { user_objects: 1, ..none },
        (When::After, Call::cuMemAddressReserve) => Left { reservations: 1, ..none },
        (When::After, Call::cuMemCreate | Call::cuMemRetainAllocationHandle) => Left { allocations: 1, ..none },
        (When::After, Call::cuMemImportFromShareableHandle) => Left { allocations: 1, imported: 1, ..none },
        // A mapping that nobody knows of keeps the addresses around it from being freed.
        (When::After, Call::cuMemMap) => Left { mappings: 1, reservations: 1, stranded: 1, ..none },
        // What may be mapped still is never freed or used again.
        (When::After, Call::cuMemUnmap) => Left { reservations: 1, stranded: 1, ..none },
        (When::After, Call::cuMemRelease | Call::cuMemAddressFree) => Left { stranded: 1, ..none },
        (When::After, Call::cuEventCreate) => Left { events: 1, ..none },
        (When::After, Call::cuStreamCreate) => Left { streams: 1, ..none },
        (When::After, Call::cuEventDestroy | Call::cuDevicePrimaryCtxRelease) => Left { stranded: 1, ..none },
        (When::After, Call::cuDevicePrimaryCtxRetain) => Left { contexts: 1, ..none },
        // The thread's context is not restored, nor its capture mode by each second exchange.
        (_, Call::cuCtxPopCurrent) => Left { stranded, ..none },
        (_, Call::cuThreadExchangeStreamCaptureMode) if step.nth.is_multiple_of(2) => Left { stranded, ..none },
        _ => none,
    }
}

/// Whether any of these resources counts addresses, mappings and memory; none where there are no resources.
fn counted(resources: Vec<VirtualMemoryResource>) -> Option<[bool; 3]> {
    let statistics = resources.iter().map(|resource| {
        // What is kept is not left.
        resource.trim(0).unwrap_or_else(|error| panic!("then trimming failed: {error}"));
        resource.statistics()
    });
    let each = statistics.map(|now| {
        let is_held = now.physical.now + now.imported.now + now.retained.now > 0;
        [now.reserved.now > 0, now.mapped.now > 0, is_held]
    });
    each.reduce(|one, other| std::array::from_fn(|index| one[index] || other[index]))
}

/// Whether addresses, mappings and memory are still counted in the end: what the driver did not say it undid, and nothing
/// that it did not say it made.
fn still_counted(failing: Failing, left: Left) -> [bool; 3] {
    match (failing.when, failing.step.call) {
        (When::Before, _) => [left.reservations > 0, left.mappings > 0, left.allocations > 0],
        (When::After, Call::cuMemMap | Call::cuMemAddressFree) => [true, false, false],
        (When::After, Call::cuMemUnmap) => [true, true, false],
        (When::After, Call::cuMemRelease) => [false, false, true],
        (When::After, _) => [false; 3],
    }
}

/// What was made to fail on a row.
struct Counts {
    calls: usize,
    codes: BTreeSet<u32>,
    cases: usize,
    /// Cases whose call did not come up, in any of the tries.
    missed: usize,
}

/// How many rows are tried at a time, each on a simulator of its own: for the most part they wait.
const SIDE_BY_SIDE: usize = 3;

/// Makes each call of each of the rows fail, and shows the counts as a table: on the standard output, and in the folder
/// for reports where there is one.
pub fn fail_every_call(backend: &Backend, rows: &[Row]) {
    let each = if backend.is_gpu() {
        rows.iter().map(|row| row.fail_each(backend)).collect()
    } else {
        fail_side_by_side(backend, rows)
    };
    let mut table =
        String::from("| operation | path | calls | codes | cases | did not come up |\n|---|---|---|---|---|---|\n");
    let (mut sum, mut all_missed) = (0, 0);
    for (row, Counts { calls, codes, cases, missed }) in rows.iter().zip(each) {
        assert!(cases > 0, "{row}: nothing was tried, and {missed} cases did not come up");
        sum += cases;
        all_missed += missed;
        let codes = codes.len();
        let _ = writeln!(table, "| {} | {} | {calls} | {codes} | {cases} | {missed} |", row.operation, row.path);
    }
    let table = format!("{}: {sum} cases, and {all_missed} that did not come up\n\n{table}", backend.test());
    println!("{table}");
    if let Some(dir) = std::env::var_os(REPORT) {
        let name = format!("faults-{}.md", backend.test().replace("::", "-"));
        std::fs::write(Path::new(&dir).join(name), table).expect("a report");
    }
}

/// The counts of each row.
fn fail_side_by_side(backend: &Backend, rows: &[Row]) -> Vec<Counts> {
    let left = Mutex::new(rows.iter().enumerate());
    let work = || {
        let backend = backend.another();
        let next = || left.lock().unwrap().next();
        let done: Vec<_> = iter::from_fn(next).map(|(index, row)| (index, row.fail_each(&backend))).collect();
        backend.finish();
        done
    };
    let done = thread::scope(|scope| {
        let threads = [(); SIDE_BY_SIDE].map(|()| scope.spawn(work));
        threads.map(|thread| thread.join().expect("rows that hold"))
    });
    done.into_iter().flatten().collect::<BTreeMap<_, _>>().into_values().collect()
}
