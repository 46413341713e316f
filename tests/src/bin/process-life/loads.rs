//! What a process has when it ends.

use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cuvmm::driver::sys::CUstreamCaptureMode;
use cuvmm::{Options, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_resource::OnDrop;
use cuvmm_tests::{Executable, G, Graph, queue_fill, retain_in_capture};

use crate::life::{Life, at_exit, await_slowness, fail, hold_at, require_child, slow_down, stop_holding, unmappings};

/// Makes it, and gives what is to be done on the thread that ends the process.
pub(crate) type Load = fn(&Life) -> Last;
pub(crate) type Last = Box<dyn FnOnce() + Send>;

pub(crate) const ALL: [(&str, Load); 8] = [
    ("entries", entries),
    ("busy", busy),
    ("half", half),
    ("thread-locals", thread_locals),
    ("threads", threads),
    ("statics", statics),
    ("graphs", graphs),
    ("forks", forks),
];

pub(crate) fn named(name: &str) -> Load {
    let found = ALL.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no such load: {name}")).1
}

static KEPT: Mutex<Vec<VirtualMemoryBuffer>> = Mutex::new(Vec::new());
static AT_EXIT: Mutex<Vec<VirtualMemoryBuffer>> = Mutex::new(Vec::new());
thread_local!(static OF_THREAD: RefCell<Vec<VirtualMemoryBuffer>> = const { RefCell::new(Vec::new()) });

pub(crate) fn keep_in_thread(buffers: impl IntoIterator<Item = VirtualMemoryBuffer>) {
    OF_THREAD.with_borrow_mut(|all| all.extend(buffers));
}

fn nothing() -> Last {
    Box::new(|| ())
}

/// Leaves some to the reaper that wait for a stream that is held up, each in another way.
pub(crate) fn leave_pending(life: &Life) {
    let (resource, stream) = (life.resource(OnDrop::Defer), life.held_stream());
    drop(life.buffer_on(&resource, &stream));
    life.buffer_on(&resource, &stream).close_deferred();
    drop(life.buffer_on(&resource, &stream).grow_into(3 * G).unwrap());
    let fenced = resource.allocate(G).unwrap();
    queue_fill(&stream, &fenced, 1);
    fenced.fence(&stream).unwrap();
    drop(fenced);
    assert!(resource.pending() >= 4, "they wait");
}

fn entries(life: &Life) -> Last {
    leave_pending(life);
    nothing()
}

/// The reaper is in a call, and has many to go.
fn busy(life: &Life) -> Last {
    slow_down(5);
    let resource = life.resource(OnDrop::Defer);
    let buffers: Vec<_> = (0..40).map(|_| resource.allocate(G).unwrap()).collect();
    drop(buffers);
    Box::new(await_slowness)
}

/// Some pieces of a large buffer are gone, and the others are not: the reaper is in a call of the third piece when the end
/// begins, and each call takes a while from then on.
fn half(life: &Life) -> Last {
    const PIECE: usize = 1 << 30;
    const CHUNK: usize = PIECE / 2;
    const CHUNKS: usize = 16;
    const HELD: usize = 5;
    extern "C" fn go_on() {
        slow_down(20);
        stop_holding();
    }
    extern "C" fn require_half() {
        let begun = unmappings();
        // Longer than it pauses between pieces.
        thread::sleep(Duration::from_millis(60));
        let later = unmappings();
        if !(HELD..CHUNKS).contains(&begun) || later != begun {
            fail(&format!("{begun} of {CHUNKS} chunks were unmapped by the end, and {later} after it"));
        }
    }
    hold_at(HELD);
    let options = Options::new().max_chunk(CHUNK).release(Release::Caller);
    let resource = VirtualMemoryResource::new(&life.device, options).unwrap();
    let buffer = resource.allocate(CHUNKS * CHUNK).unwrap();
    // It comes after the end of the reaper, whose begin is with the first that it is left, and the other one before.
    at_exit(require_half);
    buffer.close_deferred();
    at_exit(go_on);
    Box::new(|| {
        while unmappings() < HELD {
            thread::yield_now();
        }
    })
}

/// Nothing was left to the reaper before.
fn thread_locals(life: &Life) -> Last {
    let buffers = life.buffers();
    Box::new(|| keep_in_thread(buffers))
}

/// Other threads ended before, and one ends meanwhile.
fn threads(life: &Life) -> Last {
    let [before, meanwhile, last] = [(); 3].map(|()| life.buffers());
    thread::spawn(|| keep_in_thread(before)).join().unwrap();
    Box::new(|| {
        keep_in_thread(last);
        thread::spawn(|| keep_in_thread(meanwhile));
    })
}

/// In statics nothing is dropped, but by what destructors of statics of other languages do.
fn statics(life: &Life) -> Last {
    extern "C" fn let_go() {
        AT_EXIT.lock().unwrap().clear();
    }
    KEPT.lock().unwrap().extend(life.buffers());
    AT_EXIT.lock().unwrap().extend(life.buffers());
    at_exit(let_go);
    nothing()
}

/// One that is left, one in flight, and one that went just now.
fn graphs(life: &Life) -> Last {
    let resource = life.resource(OnDrop::Defer);
    let captured = |buffer: VirtualMemoryBuffer| -> (Graph, Executable) {
        let stream = StreamRef::create(&life.device).unwrap();
        let graph = Graph::capture(&stream, CUstreamCaptureMode::THREAD_LOCAL, || {
            queue_fill(&stream, &buffer, 1);
            retain_in_capture(&buffer, &stream).unwrap();
        });
        let executable = graph.instantiate(&stream);
        (graph, executable)
    };
    let [left, in_flight, gone] = [(); 3].map(|()| captured(resource.allocate(G).unwrap()));
    in_flight.1.launch(&life.held_stream());
    drop((in_flight, gone));
    std::mem::forget(left);
    nothing()
}

/// Children that exit as any program does, forked beside threads that use the library, with buffers of all kinds.
fn forks(life: &Life) -> Last {
    leave_pending(life);
    keep_in_thread(life.buffers());
    KEPT.lock().unwrap().extend(life.buffers());
    let resources = [OnDrop::Wait, OnDrop::Defer].map(|on_drop| life.resource(on_drop));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for resource in &resources {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    while resource.pending() > 100 {
                        thread::yield_now();
                    }
                    resource.allocate(G).unwrap().close_deferred();
                    drop(resource.allocate(G).unwrap().grow_into(2 * G).unwrap());
                }
            });
        }
        for _ in 0..3 {
            require_child(|| ());
        }
        is_over.store(true, Ordering::Relaxed);
    });
    nothing()
}
