//! What `tracing` is told: the spans and fields that the README of cuvmm-resource lists, by subscribers that may use the
//! library themselves.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuvmm::ipc::{Limits, export, import, import_from, receive_buffer, send_buffer};
use cuvmm::{
    CUresult, Driver, Error, GrowOptions, HandleKind, Options, Recycling, Release, StreamRef, VirtualMemoryBuffer,
};
use cuvmm::{Outcome, VirtualMemoryResource};
use cuvmm_driver::Hooked;
use cuvmm_sim::{Faults, Machine, Simulator, When};
use cuvmm_tests::G;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, with_default};
use tracing::{Event, Level, Metadata, Subscriber};

/// A span or an event, as it was told.
#[derive(Clone, Debug, Default)]
struct Told {
    is_span: bool,
    target: String,
    /// Of a span its own name, of an event its message.
    name: String,
    level: Option<Level>,
    /// The span around it.
    within: Option<String>,
    fields: BTreeMap<String, String>,
    /// The name of the thread that told it.
    thread: Option<String>,
}

impl Visit for Told {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.name = format!("{value:?}"),
            name => drop(self.fields.insert(name.to_owned(), format!("{value:?}"))),
        }
    }
}

/// Keeps all that it is told of our targets, and does something at each.
#[derive(Clone, Default)]
struct Listener {
    told: Arc<Mutex<Vec<Told>>>,
    /// The spans that each thread has entered.
    entered: Arc<Mutex<BTreeMap<String, Vec<u64>>>>,
    names: Arc<Mutex<BTreeMap<u64, String>>>,
    next: Arc<AtomicU64>,
    each: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl Listener {
    fn at_each(each: impl Fn() + Send + Sync + 'static) -> Self {
        Self { each: Some(Arc::new(each)), ..Self::default() }
    }

    /// What was told while `work` ran on this thread.
    fn listen(&self, work: impl FnOnce()) -> Vec<Told> {
        with_default(self.clone(), work);
        std::mem::take(&mut *self.told.lock().unwrap())
    }

    fn keep(&self, metadata: &Metadata<'_>, mut told: Told) {
        let inmost = self.entered.lock().unwrap().get(&this_thread()).and_then(|spans| spans.last().copied());
        told.within = inmost.and_then(|span| self.names.lock().unwrap().get(&span).cloned());
        told.target = metadata.target().to_owned();
        told.level = Some(*metadata.level());
        told.thread = std::thread::current().name().map(str::to_owned);
        self.told.lock().unwrap().push(told);
        if let Some(each) = &self.each {
            each();
        }
    }
}

impl Subscriber for Listener {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if metadata.target().starts_with("cuvmm") { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("cuvmm")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let name = span.metadata().name().to_owned();
        self.names.lock().unwrap().insert(id, name.clone());
        let mut told = Told { is_span: true, name, ..Told::default() };
        span.record(&mut told);
        self.keep(span.metadata(), told);
        Id::from_u64(id)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {
        panic!("fields are told when a span begins");
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut told = Told::default();
        event.record(&mut told);
        self.keep(event.metadata(), told);
    }

    fn enter(&self, span: &Id) {
        self.entered.lock().unwrap().entry(this_thread()).or_default().push(span.into_u64());
    }

    fn exit(&self, span: &Id) {
        let left = self.entered.lock().unwrap().get_mut(&this_thread()).and_then(Vec::pop);
        assert_eq!(left, Some(span.into_u64()));
    }
}

fn this_thread() -> String {
    format!("{:?}", std::thread::current().id())
}

struct Bench {
    driver: Driver,
    faults: Faults,
    resource: VirtualMemoryResource,
}

impl Bench {
    fn new() -> Self {
        let faults = Faults::new();
        let driver = Driver::new(Hooked::new(Simulator::new(Machine::h200()), faults.clone())).unwrap();
        let options = Options::new().handle_kind(HandleKind::PosixFd);
        let resource = VirtualMemoryResource::new(&driver.device(0).unwrap(), options).unwrap();
        Self { driver, faults, resource }
    }
}

/// Does everything once, in every way.
fn do_everything(resource: &VirtualMemoryResource) -> Result<(), Error> {
    let buffer = resource.allocate(G)?;
    drop(resource.allocate_zeroed(G)?);
    resource.allocate_zeroed_with_capacity(G, 4 * G)?.close()?;
    let ahead = resource.allocate_with_capacity(G, 16 * G)?;
    let larger = ahead.grow(4 * G)?;
    let moved = ahead.grow_with(4 * G, &GrowOptions::new().zeroed())?;
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    let covered = larger.grow(2 * G)?;
    let head = larger.truncate(G)?;
    let head = head.grow_into(8 * G)?.truncate_into(G)?;
    let descriptor = export(&larger)?;
    let first = import_from(resource, &descriptor)?;
    let second = import(resource, descriptor)?;
    let (ours, theirs) = UnixStream::pair().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let dispatch = tracing::dispatcher::get_default(Clone::clone);
    let received = std::thread::scope(|scope| {
        scope.spawn(|| tracing::dispatcher::with_default(&dispatch, || send_buffer(&ours, &buffer, deadline)));
        receive_buffer(&theirs, resource, &Limits::default(), deadline)
    })?;
    for buffer in [ahead, larger, moved, covered, head, first, second, received] {
        buffer.close()?;
    }
    let recycling = Options::new().recycling(Recycling::up_to(G));
    let recycling = VirtualMemoryResource::new(resource.device(), recycling)?;
    recycling.allocate(G)?.close()?;
    assert_eq!(recycling.trim(0)?, G);
    let stream = StreamRef::create(resource.device())?;
    buffer.set_release(Release::Stream(stream))?;
    drop(buffer);
    Ok(())
}

/// The table of the README: of each span its fields, and those of its event but for `elapsed_ns` and `error`.
fn documented() -> BTreeMap<String, [BTreeSet<String>; 2]> {
    let readme = include_str!("../../crates/cuvmm-resource/README.md");
    let (_, section) = readme.split_once("## Watching it").unwrap();
    let (_, table) = section.split_once("| span |").unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let cell = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
    let row = |line: &str| {
        let cells: Vec<_> = line.split('|').map(cell).collect();
        (cells[1].first().unwrap().clone(), [cells[2].clone(), cells[3].clone()])
    };
    rows.map(row).collect()
}

#[test]
fn spans_and_events_are_those_that_the_readme_lists() {
    let bench = Bench::new();
    let mut seen: BTreeMap<String, [BTreeSet<String>; 2]> = BTreeMap::new();
    let told = Listener::default().listen(|| do_everything(&bench.resource).unwrap());
    for told in &told {
        let target = if ["import", "export"].contains(&&*told.name) { "cuvmm_ipc" } else { "cuvmm_resource" };
        assert_eq!((&*told.target, told.level), (target, Some(Level::DEBUG)), "{told:?}");
        let fields = &mut seen.entry(told.name.clone()).or_default()[usize::from(!told.is_span)];
        fields.extend(told.fields.keys().cloned());
        if !told.is_span {
            assert_eq!(told.within.as_deref(), Some(&*told.name), "an event of its name in each span");
            assert!(told.fields.contains_key("elapsed_ns") && !told.fields.contains_key("error"), "{told:?}");
            fields.remove("elapsed_ns");
        }
    }
    assert_eq!(seen, documented());
    let (spans, events): (Vec<_>, Vec<_>) = told.iter().partition(|told| told.is_span);
    assert_eq!(spans.len(), events.len(), "one event a span");
    let outcomes: BTreeSet<_> = events.iter().filter_map(|told| told.fields.get("outcome").cloned()).collect();
    assert_eq!(outcomes, ["Covered", "InPlace", "Moved"].map(str::to_owned).into());
}

#[test]
fn events_tell_what_an_operation_came_to() {
    let bench = Bench::new();
    let mut made = None;
    let told = Listener::default().listen(|| made = bench.resource.allocate_with_capacity(G + 1, 64 << 20).ok());
    let buffer: VirtualMemoryBuffer = made.unwrap();
    let [span, event] = told.as_slice() else { panic!("{told:?}") };
    let number = |told: &Told, field: &str| told.fields[field].parse::<usize>().unwrap();
    assert_eq!((number(span, "requested"), number(span, "capacity")), (G + 1, 64 << 20));
    assert_eq!(span.fields["zeroed"], "false");
    assert_eq!(event.fields["address"], buffer.address().to_string());
    assert_eq!((number(event, "size"), number(event, "capacity"), number(event, "chunks")), (2 * G, 64 << 20, 1));
    assert!(number(event, "elapsed_ns") > 0);

    bench.faults.fail_any(1, CUresult::OUT_OF_MEMORY, When::Before);
    let mut error = None;
    let told = Listener::default().listen(|| error = buffer.grow_into(4 * G).err());
    let [_, event] = told.as_slice() else { panic!("{told:?}") };
    let error = error.unwrap();
    assert_eq!(event.fields["error"], error.error().to_string());
    assert_eq!(event.fields.keys().collect::<Vec<_>>(), ["elapsed_ns", "error"]);
    error.into_buffer().close().unwrap();
}

#[test]
fn what_is_stranded_is_told_once_as_an_error() {
    let bench = Bench::new();
    let buffer = bench.resource.allocate(G).unwrap();
    bench.faults.fail(cuvmm::Call::cuMemUnmap, 1, CUresult::UNKNOWN, When::Before);
    let told = Listener::default().listen(|| drop(buffer));
    let errors: Vec<_> = told.iter().filter(|told| told.level == Some(Level::ERROR)).collect();
    assert_eq!((errors.len(), bench.resource.statistics().stranded), (1, 1), "{told:?}");
    let end = told.last().unwrap();
    assert!(end.name == "release" && end.fields["error"].contains("cuMemUnmap"), "{end:?}");
}

/// Who drops or closes without waiting is told nothing: what comes of it is told on the thread that lets go of the memory, to
/// the subscriber of the whole process.
#[test]
fn what_is_left_to_another_thread_is_told_there() {
    let everywhere = Listener::default();
    tracing::subscriber::set_global_default(everywhere.clone()).unwrap();
    let bench = Bench::new();
    let [deferred, stranded] = [(); 2].map(|()| bench.resource.allocate(G).unwrap());
    let addresses = [&deferred, &stranded].map(|buffer| buffer.address().to_string());
    let told = Listener::default().listen(|| deferred.close_deferred());
    assert!(told.is_empty(), "{told:?}");
    bench.resource.drain(Instant::now() + Duration::from_secs(30)).unwrap();
    bench.faults.fail(cuvmm::Call::cuMemUnmap, 1, CUresult::UNKNOWN, When::Before);
    stranded.close_deferred();
    bench.resource.drain(Instant::now() + Duration::from_secs(30)).unwrap();

    // Tests beside this one leave something to that thread, too.
    let told = everywhere.told.lock().unwrap().clone();
    let told: Vec<_> = told.iter().filter(|told| told.thread.as_deref() == Some("cuvmm-reaper")).collect();
    for address in &addresses {
        let span = told.iter().find(|told| told.is_span && told.fields.get("address") == Some(address)).unwrap();
        assert_eq!((&*span.name, span.level, &*span.fields["deferred"]), ("release", Some(Level::DEBUG), "true"));
        let fields: BTreeSet<_> = span.fields.keys().filter(|field| *field != "deferred").cloned().collect();
        assert_eq!(fields, documented()["release"][0]);
    }
    let is_end = |told: &Told| !told.is_span && told.name == "release" && told.within.as_deref() == Some("release");
    let failed = |told: &Told| told.fields.get("error").is_some_and(|error| error.contains("cuMemUnmap"));
    assert!(told.iter().any(|told| is_end(told) && !told.fields.contains_key("error")), "{told:?}");
    assert!(told.iter().any(|told| is_end(told) && failed(told)), "{told:?}");
    assert!(told.iter().any(|told| told.level == Some(Level::ERROR)), "{told:?}");
    assert_eq!(bench.resource.statistics().stranded, 1);
}

/// Runs it on a thread of its own, and demands that it is over in a while: that there is no deadlock.
#[track_caller]
fn require_no_deadlock(work: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || {
        work();
        let _ = sender.send(());
    });
    let ended = receiver.recv_timeout(Duration::from_secs(60));
    assert!(ended.is_ok(), "it hangs, or it panicked: {:?}", thread.is_finished().then(|| thread.join()));
}

/// A subscriber that uses the very buffer and resource that it is told of, whatever fails: there is no lock to meet.
#[test]
fn subscribers_may_use_what_they_are_told_of() {
    require_no_deadlock(|| {
        let mut heard = 0;
        for nth in 1..100 {
            let bench = Bench::new();
            let device = bench.driver.device(0).unwrap();
            let streams: [StreamRef; 4] = std::array::from_fn(|_| StreamRef::create(&device).unwrap());
            let buffer = Arc::new(bench.resource.allocate_with_capacity(G, 16 * G).unwrap());
            for stream in &streams {
                buffer.fence(stream).unwrap();
            }
            let calls = Arc::new(AtomicUsize::new(0));
            let (shared, stream, counted) = (buffer.clone(), streams[0].clone(), calls.clone());
            let listener = Listener::at_each(move || {
                // It is not told of its own doing.
                counted.fetch_add(1, Ordering::Relaxed);
                let _ = shared.fence(&stream);
                let _ = shared.set_release(Release::Caller);
                let _ = shared.fill(0, 1, 0);
                let _ = (shared.capacity(), shared.released_after(), shared.resource().statistics());
                let _ = shared.grow(2 * G);
            });
            bench.faults.fail_any(nth, CUresult::UNKNOWN, When::Before);
            listener.listen(|| {
                for stream in &streams {
                    let _ = buffer.fence(stream);
                }
                // More than are kept unsorted.
                for _ in 0..8 {
                    let other = StreamRef::create(&device).unwrap_or_else(|_| streams[1].clone());
                    let _ = buffer.fence(&other);
                }
                let _ = buffer.fill(0, G, 1);
                let _ = buffer.grow(4 * G);
                let _ = buffer.truncate(G);
            });
            heard += calls.load(Ordering::Relaxed);
        }
        assert!(heard > 500, "{heard}");
    });
}

/// A subscriber that panics while a fence is made takes none of the others away.
#[test]
fn a_fence_survives_a_subscriber_that_panics() {
    let bench = Bench::new();
    let device = bench.driver.device(0).unwrap();
    let stream = StreamRef::create(&device).unwrap();
    let buffer = bench.resource.allocate(G).unwrap();
    buffer.fence(&stream).unwrap();
    let listener = Listener::at_each(|| panic!("a subscriber of no use"));
    // The thread's context is not restored, which is told while the fence is made.
    bench.faults.fail(cuvmm::Call::cuCtxPopCurrent, 1, CUresult::UNKNOWN, When::Before);
    let fenced = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = listener.listen(|| drop(buffer.fence(&stream)));
    }));
    assert!(fenced.is_err());
    let waits = Arc::new(AtomicUsize::new(0));
    let counted = waits.clone();
    bench.faults.fail_when(
        cuvmm::Call::cuEventSynchronize,
        move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            false
        },
        CUresult::UNKNOWN,
        When::Before,
    );
    buffer.close().unwrap();
    assert_eq!(waits.load(Ordering::Relaxed), 1, "it waits for what was fenced before");
}
