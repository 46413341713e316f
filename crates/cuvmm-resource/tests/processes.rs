//! Buffers in a forked child, and at the end of a process.
//!
//! # Safety
//! A child that is forked here drops what it inherited, reads its own memory, and ends by `_exit`: it needs nothing
//! that another thread could have held. Its allocator is the C library's, which `fork` leaves usable.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::cell::RefCell;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cuvmm_driver::{Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_resource::{Error, Location, Options, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Machine, Simulator};
use support::{Bench, G};

unsafe extern "C" {
    safe fn fork() -> i32;
    safe fn alarm(seconds: u32) -> u32;
    safe fn _exit(status: i32) -> !;
    unsafe fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    safe fn atexit(function: extern "C" fn()) -> i32;
}

/// Runs `work` in a forked child, which is killed if it is not over in ten seconds, and gives its exit code; none
/// for a child that was killed.
fn in_child(work: impl FnOnce() -> i32) -> Option<i32> {
    let child = fork();
    if child == 0 {
        alarm(10);
        _exit(work());
    }
    assert!(child > 0, "a child");
    let mut status = 0;
    // SAFETY: the output is ours.
    assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
    (status & 0x7f == 0).then_some(status >> 8 & 0xff)
}

/// Counts calls without a lock.
#[derive(Clone, Default)]
struct Count(Arc<AtomicUsize>);

impl Hook for Count {
    fn before(&self, _: &Invocation<'_>) -> Option<Failure> {
        self.0.fetch_add(1, Ordering::Relaxed);
        None
    }
}

#[test]
fn a_forked_child_drops_buffers_streams_and_resources_without_a_call() {
    let (simulator, count) = (Simulator::new(Machine::small()), Count::default());
    let driver = Driver::new(Hooked::new(simulator.clone(), count.clone())).unwrap();
    let device = driver.device(0).unwrap();
    let resource = VirtualMemoryResource::new(&device, Options::new()).unwrap();
    let buffer = resource.allocate(G).unwrap();
    buffer.fill(0, G, 1).unwrap();
    let stream = StreamRef::create(&device).unwrap();
    buffer.fence(&stream).unwrap();
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let grown = buffer.grow(5 * G).unwrap();
    let empty = resource.allocate_with_capacity(0, G).unwrap();
    let live = simulator.live();
    let before = count.0.load(Ordering::Relaxed);
    let mut all = Some((buffer, grown, empty, stream, resource));
    let code = in_child(|| {
        drop(all.take());
        let quiet = count.0.load(Ordering::Relaxed) == before && driver.stranded().is_empty();
        if quiet { 42 } else { 1 }
    });
    assert_eq!(code, Some(42));
    assert_eq!(simulator.live(), live, "all of it is still the parent's");
    let (buffer, grown, empty, ..) = all.take().unwrap();
    grown.close().unwrap();
    buffer.close().unwrap();
    empty.close().unwrap();
    assert!(simulator.live().is_empty());
    assert_eq!(simulator.violations(), []);
}

#[test]
fn a_forked_child_gives_nothing_to_graphs() {
    let (simulator, count) = (Simulator::new(Machine::small()), Count::default());
    let driver = Driver::new(Hooked::new(simulator.clone(), count.clone())).unwrap();
    let device = driver.device(0).unwrap();
    let buffer = VirtualMemoryResource::new(&device, Options::new()).unwrap().allocate(G).unwrap();
    let (stream, graph) = (StreamRef::create(&device).unwrap(), driver.graph_create().unwrap());
    let before = count.0.load(Ordering::Relaxed);
    let code = in_child(|| {
        // SAFETY: the graph is this thread's.
        let by_name = unsafe { buffer.retain_in_graph(graph) };
        // SAFETY: nothing captures.
        let captured = unsafe { buffer.retain_in_capture(&stream) };
        let quiet = count.0.load(Ordering::Relaxed) == before;
        if quiet && [by_name, captured] == [Err(Error::Forked), Err(Error::Forked)] { 42 } else { 1 }
    });
    assert_eq!(code, Some(42));
}

const ROLE: &str = "CUVMM_RESOURCE_END_WITH";
static KEPT: Mutex<Vec<VirtualMemoryBuffer>> = Mutex::new(Vec::new());
static AT_EXIT: Mutex<Vec<VirtualMemoryBuffer>> = Mutex::new(Vec::new());
thread_local!(static OF_THREAD: RefCell<Vec<VirtualMemoryBuffer>> = const { RefCell::new(Vec::new()) });

/// What a static destructor of a C++ program does.
extern "C" fn let_go() {
    if let Ok(mut kept) = AT_EXIT.lock() {
        kept.clear();
    }
}

/// A process ends in silence, whatever holds its buffers, also when the driver has shut down before.
#[test]
fn a_process_ends_quietly_with_buffers_in_statics() {
    if let Some(role) = std::env::var_os(ROLE) {
        let bench = Bench::small();
        let stream = StreamRef::create(&bench.device()).unwrap();
        for release in [Release::DefaultStream, Release::Stream(stream.clone()), Release::Caller] {
            let resource = bench.resource(Options::new().release(release));
            let buffers = [(); 3].map(|()| resource.allocate(G).unwrap().grow_into(3 * G).unwrap());
            for buffer in &buffers {
                buffer.fill(0, G, 1).unwrap();
                buffer.fence(&stream).unwrap();
            }
            let [kept, at_exit, of_thread] = buffers;
            KEPT.lock().unwrap().push(kept);
            AT_EXIT.lock().unwrap().push(at_exit);
            OF_THREAD.with_borrow_mut(|all| all.push(of_thread));
        }
        assert_eq!(atexit(let_go), 0);
        if role == "shut down" {
            bench.simulator.shut_down();
        }
        return;
    }
    for role in ["alive", "shut down"] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["a_process_ends_quietly_with_buffers_in_statics", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .output()
            .unwrap();
        assert!(output.status.success(), "{role}: {}", output.status);
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{role}");
    }
}

#[test]
fn after_the_driver_has_shut_down_closing_says_so_and_strands_nothing() {
    let bench = Bench::small();
    let buffers = [(); 2].map(|()| bench.plain().allocate(G).unwrap().grow_into(3 * G).unwrap());
    bench.simulator.shut_down();
    let [closed, dropped] = buffers;
    let (error, buffer) = closed.close().unwrap_err().into_parts();
    assert_eq!(error.code(), Some(cuvmm_driver::CUresult::DEINITIALIZED));
    assert!(buffer.is_none(), "it is closed all the same");
    drop(dropped);
    assert!(bench.driver.stranded().is_empty());
}

/// Memory of the host is not a child's: a driver maps it for the process that asked.
#[test]
fn a_forked_child_does_not_touch_memory_of_the_host() {
    let bench = Bench::small();
    let resource = bench.resource(Options::new().location(Location::Host));
    let buffer = resource.allocate(G).unwrap();
    let code = in_child(|| {
        let refused = [buffer.fill(0, G, 1), buffer.copy_from_host(0, &[1]), buffer.copy_to_host(0, &mut [0])];
        let is_kept = refused.iter().all(|result| *result == Err(Error::Forked)) && buffer.host_pointer().is_none();
        if is_kept { 42 } else { 1 }
    });
    assert_eq!(code, Some(42));
    assert!(buffer.host_pointer().is_some());
    buffer.fill(0, G, 1).unwrap();
    drop((buffer, resource));
    bench.assert_clean();
}
