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
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemAllocationProp};
use cuvmm_driver::{Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_handles::Allocation;
use cuvmm_resource::{
    CloseError, DeallocateError, Error, HandleKind, Location, Options, Recycling, Release, ResizeError, StreamRef,
    VirtualMemoryBuffer, VirtualMemoryResource,
};
use cuvmm_sim::{Machine, Simulator};
use support::{Bench, G, R};

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

/// Tells the other threads that it is over, also where the test fails: their scope waits for them.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
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
    let recycling = Options::new().release(Release::Caller).recycling(Recycling::up_to(8 * G));
    let recycling = VirtualMemoryResource::new(&device, recycling).unwrap();
    recycling.allocate(G).unwrap().close().unwrap();
    let keeping = recycling.allocate(2 * G).unwrap();
    let live = simulator.live();
    let before = count.0.load(Ordering::Relaxed);
    let mut all = Some((buffer, grown, empty, stream, resource, keeping, recycling));
    let code = in_child(|| {
        let refused = all.as_ref().map(|all| all.6.trim(0)) == Some(Err(Error::Forked));
        drop(all.take());
        let quiet = count.0.load(Ordering::Relaxed) == before && driver.stranded().is_empty();
        if quiet && refused { 42 } else { 1 }
    });
    assert_eq!(code, Some(42));
    assert_eq!(simulator.live(), live, "all of it is still the parent's");
    let (buffer, grown, empty, _, _, keeping, recycling) = all.take().unwrap();
    keeping.close().unwrap();
    assert_eq!(recycling.trim(0).unwrap(), 3 * G);
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

/// Whatever can fail is refused, and what can't needs no lock, while other threads grow, fill, probe and let go.
#[test]
fn a_forked_child_is_refused_without_a_call_or_a_lock() {
    let (simulator, count) = (Simulator::new(Machine::small()), Count::default());
    let driver = Driver::new(Hooked::new(simulator.clone(), count.clone())).unwrap();
    let device = driver.device(0).unwrap();
    let resource = VirtualMemoryResource::new(&device, Options::new()).unwrap();
    let shared = resource.allocate_with_capacity(G, 8 * G).unwrap();
    let stream = StreamRef::create(&device).unwrap();
    let properties = CUmemAllocationProp::pinned(device.location(), CUmemAllocationHandleType::NONE);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    drop(shared.grow(2 * G).unwrap());
                    shared.fill(0, 1, 1).unwrap();
                    shared.fence(&stream).unwrap();
                }
            });
            // Between those a buffer's own lock is rarely held.
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    drop(shared.released_after());
                }
            });
        }
        let _over = Over(&is_over);
        for round in 0..200 {
            let mut buffers = Some([(); 4].map(|()| resource.allocate_with_capacity(G, 2 * G).unwrap()));
            let code = in_child(|| {
                let Some([grown, cut, one, other]) = buffers.take() else { return 101 };
                let before = count.0.load(Ordering::Relaxed);
                let whole = |error: ResizeError| (error.error() == &Error::Forked, error.into_buffer().size());
                if [grown.grow_into(2 * G), cut.truncate_into(0)].map(|ended| ended.map_err(whole).err())
                    != [Some((true, G)); 2]
                {
                    return 1;
                }
                let made = |_, size| -> Result<_, Error> { Ok(Allocation::create(&driver, size, &properties)?) };
                let refused = [
                    VirtualMemoryResource::new(&device, Options::new()).map(drop),
                    VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd)).map(drop),
                    StreamRef::create(&device).map(drop),
                    stream.synchronize(),
                    resource.allocate(G).map(drop),
                    resource.allocate(0).map(drop),
                    resource.allocate_with_capacity(0, G).map(drop),
                    resource.allocate_zeroed(G).map(drop),
                    resource.allocate_zeroed_with_capacity(G, G).map(drop),
                    resource.map_chunks(&[G], G, made).map(drop),
                    resource.map_chunks(&[], 0, made).map(drop),
                    resource.is_vmm(shared.address()).map(drop),
                    // SAFETY: nothing is made of it.
                    unsafe { resource.wrap(shared.address(), G) }.map(drop),
                    // SAFETY: nothing is made of it.
                    unsafe { resource.from_raw(shared.address(), R, Release::Caller) }.map(drop),
                    // SAFETY: nothing is given back.
                    unsafe { resource.deallocate(shared.address(), R, Release::Caller) }
                        .map_err(DeallocateError::into_error),
                    shared.grow(2 * G).map(drop),
                    shared.grow(G).map(drop),
                    shared.grow_in_place(2 * G).map(drop),
                    shared.truncate(G).map(drop),
                    shared.fill(0, 1, 1),
                    shared.fill_on(&stream, 0, 1, 1),
                    shared.copy_from_host(0, &[1]),
                    shared.copy_to_host(0, &mut [1]),
                    shared.fence(&stream),
                    shared.set_release(Release::Caller),
                    resource.drain(Instant::now()),
                    resource.clone().close(Instant::now()),
                ];
                if let Some(other) = refused.iter().position(|result| *result != Err(Error::Forked)) {
                    return 2 + other as i32;
                }
                let known = (shared.size(), shared.chunks().len(), one.capacity() >= 2 * G);
                if known != (G, 1, true) || resource.statistics().stranded != 0 {
                    return 100;
                }
                let end = |ended: Result<(), CloseError>| ended.err().map(CloseError::into_parts);
                let (Some((Error::Forked, Some(one))), Some((Error::Forked, Some(other)))) =
                    (end(one.close()), end(other.close_within(Instant::now())))
                else {
                    return 103;
                };
                one.close_deferred();
                drop(other);
                let is_quiet = count.0.load(Ordering::Relaxed) == before && driver.stranded().is_empty();
                if is_quiet { 42 } else { 102 }
            });
            assert_eq!(code, Some(42), "round {round}: none is a child that hung");
        }
    });
    shared.close().unwrap();
    drop((resource, stream));
    assert!(simulator.live().is_empty());
    assert!(driver.stranded().is_empty());
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
