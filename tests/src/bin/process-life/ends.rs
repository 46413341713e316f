//! Processes that end in ways of their own, each by a function that begins it.

use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cuvmm::{Options, Release, StreamRef, VirtualMemoryResource};
use cuvmm_resource::OnDrop;
use cuvmm_sim::{Machine, Simulator};
use cuvmm_tests::{G, Owner, in_host_function};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::life::{Life, at_exit, await_slowness, require_child, say_ready, slow_down};
use crate::loads::{keep_in_thread, leave_pending};

/// Is given the backend, and begins the driver.
pub(crate) type End = fn(&str);

pub(crate) const ALL: [(&str, End); 10] = [
    ("a-call-hangs", a_call_hangs),
    ("the-reaper-exits", the_reaper_exits),
    ("the-reaper-exits-too", the_reaper_exits_too),
    ("a-host-function-exits", a_host_function_exits),
    ("a-thread-ends-late", a_thread_ends_late),
    ("dropped-late", dropped_late),
    ("a-child-has-its-own", a_child_has_its_own),
    ("the-reaper-forks", the_reaper_forks),
    ("no-thread", no_thread),
    ("a-panic", a_panic),
];

pub(crate) fn named(name: &str) -> End {
    let found = ALL.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no such end: {name}")).1
}

/// How long a process waits that another thread is to end.
const PATIENCE: Duration = Duration::from_secs(30);

fn await_end() -> ! {
    thread::sleep(PATIENCE);
    panic!("nobody ended the process");
}

/// Has something done on the reaper's thread.
fn on_the_reaper(life: &Life, last: impl Fn() + Send + Sync + 'static) {
    let stream = Owner::share(&StreamRef::create(&life.device).unwrap(), last);
    let buffer = life.resource(OnDrop::Defer).allocate(G).unwrap();
    buffer.set_release(Release::Stream(stream)).unwrap();
    buffer.close_deferred();
}

/// The exit waits for it for a second.
fn a_call_hangs(backend: &str) {
    let life = Life::begin(backend);
    slow_down(60_000);
    life.resource(OnDrop::Defer).allocate(G).unwrap().close_deferred();
    await_slowness();
    say_ready();
}

fn the_reaper_exits(backend: &str) {
    let life = Life::begin(backend);
    leave_pending(&life);
    on_the_reaper(&life, || {
        say_ready();
        exit(0);
    });
    await_end();
}

/// At the same time as two other threads.
fn the_reaper_exits_too(backend: &str) {
    let life = Life::begin(backend);
    leave_pending(&life);
    let all = Arc::new(Barrier::new(3));
    let [one, other] = [(); 2].map(|()| all.clone());
    on_the_reaper(&life, move || {
        one.wait();
        exit(0);
    });
    thread::spawn(move || {
        other.wait();
        exit(0);
    });
    say_ready();
    all.wait();
}

fn a_host_function_exits(backend: &str) {
    let life = Life::begin(backend);
    leave_pending(&life);
    let stream = StreamRef::create(&life.device).unwrap();
    in_host_function(&stream, || {
        say_ready();
        exit(0);
    });
}

/// Sends the word to a thread to end, and waits for that, when the driver and the reaper have ended.
static LATE: Mutex<Option<(Sender<()>, JoinHandle<()>)>> = Mutex::new(None);

fn a_thread_ends_late(backend: &str) {
    extern "C" fn end() {
        let (sender, thread) = LATE.lock().unwrap().take().unwrap();
        sender.send(()).unwrap();
        thread.join().unwrap();
    }
    at_exit(end);
    let life = Life::begin(backend);
    leave_pending(&life);
    let buffers = life.buffers();
    let (sender, receiver) = channel();
    let thread = thread::spawn(move || {
        keep_in_thread(buffers);
        receiver.recv().unwrap();
    });
    *LATE.lock().unwrap() = Some((sender, thread));
    say_ready();
}

/// The reaper is first used when the driver has ended.
fn dropped_late(backend: &str) {
    static BUFFERS: Mutex<Vec<cuvmm::VirtualMemoryBuffer>> = Mutex::new(Vec::new());
    extern "C" fn let_go() {
        BUFFERS.lock().unwrap().clear();
    }
    at_exit(let_go);
    let life = Life::begin(backend);
    BUFFERS.lock().unwrap().extend(life.buffers());
    say_ready();
}

/// What a child does not have from its parent.
fn resource_of_child(on_drop: OnDrop) -> (Simulator, VirtualMemoryResource) {
    let simulator = Simulator::new(Machine::small());
    let device = simulator.driver().unwrap().device(0).unwrap();
    let resource = VirtualMemoryResource::new(&device, Options::new().on_drop(on_drop)).unwrap();
    (simulator, resource)
}

fn a_child_has_its_own(backend: &str) {
    let life = Life::begin(backend);
    leave_pending(&life);
    require_child(|| {
        let (simulator, resource) = resource_of_child(OnDrop::Defer);
        for _ in 0..10 {
            drop(resource.allocate(G).unwrap());
        }
        resource.drain(Instant::now() + Duration::from_secs(10)).unwrap();
        assert_eq!(simulator.physical_bytes(0), 0);
        // One is left when it exits, which its own reaper is to notice.
        drop(resource.allocate(G).unwrap());
    });
    say_ready();
}

/// The child's thread is not the reaper: its drops wait.
fn the_reaper_forks(backend: &str) {
    static HAS_FORKED: AtomicBool = AtomicBool::new(false);
    let life = Life::begin(backend);
    on_the_reaper(&life, || {
        require_child(|| {
            let (simulator, resource) = resource_of_child(OnDrop::Wait);
            for _ in 0..100 {
                drop(resource.allocate(G).unwrap());
                assert_eq!(simulator.physical_bytes(0), 0);
            }
        });
        HAS_FORKED.store(true, Ordering::SeqCst);
    });
    let start = Instant::now();
    while !HAS_FORKED.load(Ordering::SeqCst) {
        assert!(start.elapsed() < PATIENCE, "the child hangs, or failed");
        thread::yield_now();
    }
    say_ready();
}

/// What is left while no thread can be started goes with what is left later.
fn no_thread(backend: &str) {
    let life = Life::begin(backend);
    let resource = life.resource(OnDrop::Defer);
    let [one, other] = [(); 2].map(|()| resource.allocate(G).unwrap());
    let (soft, hard) = getrlimit(Resource::RLIMIT_AS).unwrap();
    setrlimit(Resource::RLIMIT_AS, 1 << 20, hard).unwrap();
    assert!(thread::Builder::new().spawn(|| ()).is_err(), "it is to fail");
    drop(one);
    let pending = resource.pending();
    let drained = resource.drain(Instant::now());
    setrlimit(Resource::RLIMIT_AS, soft, hard).unwrap();
    assert_eq!((pending, drained.is_err()), (1, true));
    drop(other);
    resource.drain(Instant::now() + PATIENCE).unwrap();
    say_ready();
}

/// For a program that aborts when it panics.
fn a_panic(backend: &str) {
    let life = Life::begin(backend);
    leave_pending(&life);
    keep_in_thread(life.buffers());
    say_ready();
    panic!("a surprise");
}
