//! [`Life`]: a process's driver, and what is seen of it.
//!
//! # Safety
//! A child that is forked is one of a process whose other threads hold whatever they do. It takes no lock of the simulator's
//! that it inherits.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cuvmm::{Call, Device, Driver, Options, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_driver::{Failure, Hook, Hooked, Invocation, Table, process_id};
use cuvmm_resource::OnDrop;
use cuvmm_sim::{Machine, Preset, Simulator};
use cuvmm_tests::{G, hold_up, queue_fill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

unsafe extern "C" {
    safe fn atexit(function: extern "C" fn()) -> c_int;
    safe fn alarm(seconds: u32) -> u32;
    safe fn exit(status: c_int) -> !;
    safe fn _exit(status: c_int) -> !;
}

pub(crate) struct Life {
    pub(crate) driver: Driver,
    pub(crate) device: Device,
    /// How long its streams are held up: on the simulator longer than the process lives. A real driver may wait for them.
    hold: Duration,
}

/// What the functions for the exit end, and the process whose it is.
static SIMULATOR: OnceLock<(u32, Simulator)> = OnceLock::new();
static HAS_DRIVER_ENDED: AtomicBool = AtomicBool::new(false);
static LATE_CALLS: AtomicUsize = AtomicUsize::new(0);
/// How many milliseconds each unmapping takes on the reaper's thread, and whether one has begun.
static SLOWNESS: AtomicU64 = AtomicU64::new(0);
static IS_SLOW: AtomicBool = AtomicBool::new(false);
/// How many unmappings the reaper has begun, and at which of them it is held up; 0 for none.
static UNMAPPINGS: AtomicUsize = AtomicUsize::new(0);
static HELD_AT: AtomicUsize = AtomicUsize::new(0);

impl Life {
    /// Starts the driver, whose end comes as that of a real one: by a function for the exit.
    pub(crate) fn begin(backend: &str) -> Self {
        let (preset, hold) = match backend {
            "strict" => (Some(Preset::Strict), Duration::from_secs(60)),
            "measured" => (Some(Preset::Measured), Duration::from_secs(60)),
            "gpu" => (None, Duration::from_millis(500)),
            _ => panic!("no such backend: {backend}"),
        };
        let driver = match preset {
            Some(preset) => {
                let (_, simulator) =
                    SIMULATOR.get_or_init(|| (process_id(), Simulator::new(Machine::h200().preset(preset))));
                Driver::new(Hooked::new(simulator.clone(), Seen))
            }
            None => Driver::new(Hooked::new(Table::load().unwrap(), Seen)),
        };
        let driver = driver.unwrap();
        at_exit(end_of_driver);
        let device = driver.device(0).unwrap();
        // It stays active: the end of a context waits for what is queued in it.
        device.primary_ctx_retain().unwrap();
        Self { driver, device, hold }
    }

    pub(crate) fn resource(&self, on_drop: OnDrop) -> VirtualMemoryResource {
        VirtualMemoryResource::new(&self.device, Options::new().on_drop(on_drop)).unwrap()
    }

    /// One whose drop waits, and one whose drop is deferred, each with a little work queued.
    pub(crate) fn buffers(&self) -> [VirtualMemoryBuffer; 2] {
        [OnDrop::Wait, OnDrop::Defer].map(|on_drop| {
            let stream = StreamRef::create(&self.device).unwrap();
            hold_up(&self.driver, &stream, 1000);
            self.buffer_on(&self.resource(on_drop), &stream)
        })
    }

    /// One that waits for a fill on the stream.
    pub(crate) fn buffer_on(&self, resource: &VirtualMemoryResource, stream: &StreamRef) -> VirtualMemoryBuffer {
        let buffer = resource.allocate(G).unwrap();
        buffer.set_release(Release::Stream(stream.clone())).unwrap();
        queue_fill(stream, &buffer, 1);
        buffer
    }

    /// A stream that is held up for long.
    pub(crate) fn held_stream(&self) -> StreamRef {
        let stream = StreamRef::create(&self.device).unwrap();
        hold_up(&self.driver, &stream, self.hold.as_micros() as usize);
        stream
    }
}

/// Sees the reaper's calls.
struct Seen;

impl Hook for Seen {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        if thread::current().name() != Some("cuvmm-reaper") {
            return None;
        }
        if HAS_DRIVER_ENDED.load(Ordering::SeqCst) {
            LATE_CALLS.fetch_add(1, Ordering::SeqCst);
        }
        if invocation.call != Call::cuMemUnmap {
            return None;
        }
        let begun = UNMAPPINGS.fetch_add(1, Ordering::SeqCst) + 1;
        while HELD_AT.load(Ordering::SeqCst) == begun {
            thread::sleep(Duration::from_millis(1));
        }
        let slowness = SLOWNESS.load(Ordering::SeqCst);
        if slowness > 0 {
            IS_SLOW.store(true, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(slowness));
        }
        None
    }
}

/// Lets each unmapping of the reaper's take that long.
pub(crate) fn slow_down(milliseconds: u64) {
    SLOWNESS.store(milliseconds, Ordering::SeqCst);
}

/// Waits until the reaper is unmapping something slowly.
pub(crate) fn await_slowness() {
    while !IS_SLOW.load(Ordering::SeqCst) {
        thread::yield_now();
    }
}

/// Holds the reaper up at that unmapping, until it is let go.
pub(crate) fn hold_at(unmapping: usize) {
    HELD_AT.store(unmapping, Ordering::SeqCst);
}

pub(crate) fn stop_holding() {
    HELD_AT.store(0, Ordering::SeqCst);
}

/// How many unmappings the reaper has begun.
pub(crate) fn unmappings() -> usize {
    UNMAPPINGS.load(Ordering::SeqCst)
}

/// Ends a process that ought to have ended otherwise.
pub(crate) fn fail(why: &str) -> ! {
    eprintln!("{why}");
    _exit(3);
}

/// A process that hangs is killed.
pub(crate) fn limit() {
    alarm(50);
}

/// Says that all is as the test wants it.
pub(crate) fn say_ready() {
    println!("ready");
    std::io::stdout().flush().unwrap();
}

/// Has a function called at the exit, before those that were given earlier.
pub(crate) fn at_exit(function: extern "C" fn()) {
    assert_eq!(atexit(function), 0);
}

/// To be called before the driver begins: demands that the reaper makes no call after its end.
pub(crate) fn watch_for_late_calls() {
    extern "C" fn require_none() {
        let late = LATE_CALLS.load(Ordering::SeqCst);
        if late > 0 {
            fail(&format!("the reaper made {late} calls after the end of the driver"));
        }
    }
    at_exit(require_none);
}

/// What a driver does at the exit. In a forked child there is none to end.
extern "C" fn end_of_driver() {
    HAS_DRIVER_ENDED.store(true, Ordering::SeqCst);
    if let Some((process, simulator)) = SIMULATOR.get()
        && *process == process_id()
    {
        simulator.shut_down();
    }
}

/// Forks a child that does `work` and then exits as any program does, and demands that it does so, and soon.
pub(crate) fn require_child(work: impl FnOnce()) {
    // SAFETY: the allocator is the C library's, which can be used in a child; no other lock of another thread is touched.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            alarm(20);
            // It does not unwind into what was the parent's.
            let done = catch_unwind(AssertUnwindSafe(work));
            // Not the standard library's, which takes a lock of its own that a thread may have had which began just then.
            exit(c_int::from(done.is_err()));
        }
        ForkResult::Parent { child } => assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0))),
    }
}
