//! Any sequence of calls with any arguments whose host pointers are null or valid: each gets an answer, nothing of the
//! process is harmed, and nothing is left when the driver is dropped. There is one test here, so that what the process
//! has is what the test has.
//!
//! `CUVMM_CALLS` says how many calls each machine gets, and `CUVMM_SEED` what they follow from: `cargo xtask soak` runs
//! many, with many seeds.

#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "tests: the macro's one expression")]

mod any;
#[path = "../support/every_call.rs"]
mod support;
#[path = "../support/threads.rs"]
mod threads;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;
use cuvmm_driver::{Call, Driver, RawDriver, for_each_call};
use cuvmm_sim::{Hints, Machine, NumaNode, Preset, Simulator};

use crate::any::Any;
use crate::threads::threads;
use crate::world::{CHUNK, DRIVER, INSIDE, Seen, World};

const CALLS: usize = 20_000;
const THREADS: usize = 4;

type Make = fn(&dyn RawDriver, &mut World<'_>) -> CUresult;

macro_rules! calls {
    ($($kind:ident $name:ident $export:literal $version:literal ($($arg:ident: $ty:ty),*);)*) => {
        /// Every call of the list, with any arguments.
        const EVERY: &[(Call, Make)] = &[
            $((Call::$name, |raw, world| {
                $(
                    world.argument = stringify!($arg);
                    let $arg = <$ty>::any(world);
                )*
                let _ = &world;
                // SAFETY: pointers are null or valid for what the call reads and writes, as the module of the
                // arguments promises; all else is any number, which a simulator looks up.
                unsafe { raw.$name($($arg),*) }
            })),*
        ];
    };
}

for_each_call!(calls);

/// What most of the calls are, so that there is something to be refused.
const FAVOURED: [Call; 20] = [
    Call::cuMemAddressReserve,
    Call::cuMemCreate,
    Call::cuMemCreate,
    Call::cuMemMap,
    Call::cuMemMap,
    Call::cuMemMap,
    Call::cuMemSetAccess,
    Call::cuMemSetAccess,
    Call::cuMemUnmap,
    Call::cuMemsetD8Async,
    Call::cuMemExportToShareableHandle,
    Call::cuMemImportFromShareableHandle,
    Call::cuLaunchHostFunc,
    Call::cuStreamCreate,
    Call::cuStreamEndCapture,
    Call::cuGraphLaunch,
    Call::cuGraphRetainUserObject,
    Call::cuModuleLoadData,
    Call::cuModuleGetFunction,
    Call::cuLaunchKernel,
];

/// What ends so much that little would be left if it were as frequent as others.
const RARE: [Call; 3] = [Call::cuDevicePrimaryCtxReset, Call::cuDevicePrimaryCtxRelease, Call::cuCtxDestroy];

/// Makes one call; whether it succeeded.
fn make_any(raw: &dyn RawDriver, world: &mut World<'_>) -> bool {
    let (mut call, mut make) = EVERY[world.numbers.below(EVERY.len() as u64) as usize];
    if world.numbers.one_in(2) || (RARE.contains(&call) && !world.numbers.one_in(20)) {
        let name = FAVOURED[world.numbers.below(FAVOURED.len() as u64) as usize];
        (call, make) = EVERY.iter().copied().find(|(other, _)| *other == name).unwrap();
    }
    (world.call, world.is_number) = (call, false);
    let success = make(raw, world).is_success();
    for written in std::mem::take(&mut world.written) {
        written(world, success);
    }
    success
}

/// Makes memory that can be used, as a well-behaved caller does: what follows by chance alone is mostly refused.
fn make_buffer(raw: &dyn RawDriver, world: &mut World<'_>) {
    let size = (CHUNK * (1 + world.numbers.below(3))) as usize;
    let properties = CUmemAllocationProp::pinned(CUmemLocation::device(0), CUmemAllocationHandleType::any(world));
    let access = CUmemAccessDesc { location: CUmemLocation::device(0), flags: CUmemAccess_flags::READWRITE };
    let (mut address, mut memory) = (CUdeviceptr(0), CUmemGenericAllocationHandle(0));
    // SAFETY: the pointers are locals'.
    let made = unsafe {
        raw.cuMemAddressReserve(&raw mut address, size, 0, CUdeviceptr(0), 0).is_success()
            && raw.cuMemCreate(&raw mut memory, size, &raw const properties, 0).is_success()
            && raw.cuMemMap(address, size, 0, memory, 0).is_success()
            && raw.cuMemSetAccess(address, size, &raw const access, 1).is_success()
    };
    if made {
        address.keep(world);
        memory.keep(world);
    }
}

/// How often each call succeeded.
type Counts = BTreeMap<Call, usize>;

fn make_many(simulator: &Simulator, seed: u64, seen: &Mutex<Seen>, lasting: u64, calls: usize) -> Counts {
    let mut world = World::new(seed, seen, lasting);
    let mut counts = Counts::new();
    enter(simulator);
    for index in 0..calls {
        if make_any(simulator, &mut world) {
            *counts.entry(world.call).or_default() += 1;
        }
        if index % 16 == 0 {
            make_buffer(simulator, &mut world);
        }
        if index % 512 == 0 {
            // A broken context would refuse all later work.
            // SAFETY: numbers alone.
            let _ = unsafe { simulator.cuDevicePrimaryCtxReset(CUdevice(0)) };
            enter(simulator);
            simulator.clear_violations();
        }
    }
    counts
}

/// What a process can have left over.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    files: usize,
    threads: usize,
    /// Where simulators place what is not huge.
    addresses: usize,
}

fn left() -> Left {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let starts = maps.lines().filter_map(|line| u64::from_str_radix(line.split('-').next()?, 16).ok());
    Left {
        files: std::fs::read_dir("/proc/self/fd").unwrap().count(),
        threads: threads(),
        addresses: starts.filter(|start| (0x0100_0000_0000..0x0800_0000_0000).contains(start)).count(),
    }
}

/// Makes the context of device 0 current on this thread, which is in no capture of its own making then.
fn enter(simulator: &Simulator) {
    let mut context = CUcontext::NULL;
    // SAFETY: the output is a local.
    let mut retain = || unsafe { simulator.cuDevicePrimaryCtxRetain(&raw mut context, CUdevice(0)) };
    loop {
        // What broke a context outlives it, and another thread may break one in between.
        simulator.mend_devices();
        match retain().0 {
            0 => break,
            code => assert!((700..720).contains(&code), "{code}"),
        }
    }
    // SAFETY: a number alone.
    let code = unsafe { simulator.cuCtxSetCurrent(context) }.0;
    // Another thread may reset it in between.
    assert!(matches!(code, 0 | 709), "{code}");
}

/// Memory that stays mapped, far from what is reserved otherwise.
fn lasting(driver: &Driver) -> u64 {
    let properties = CUmemAllocationProp::pinned(CUmemLocation::device(0), CUmemAllocationHandleType::NONE);
    let size = 2 << 20;
    let address = driver.mem_address_reserve(128 << 30, 0, CUdeviceptr(0)).unwrap();
    let memory = driver.mem_create(size, &properties).unwrap();
    let access = CUmemAccessDesc { location: CUmemLocation::device(0), flags: CUmemAccess_flags::READWRITE };
    // SAFETY: the range and the handle are alive and ours.
    unsafe { driver.mem_map(address, size, memory) }.unwrap();
    // SAFETY: all of it is mapped, and nothing runs.
    unsafe { driver.mem_set_access(address, size, &[access]) }.unwrap();
    address.0
}

fn machines() -> [(&'static str, Machine); 5] {
    let small = || Machine::small().device_memory(1 << 26);
    let mut pair = Machine::h200_pair().device_memory(1 << 26).preset(Preset::Measured).with_imex();
    (pair.granularity, pair.reservation_unit) = (small().granularity, small().reservation_unit);
    let odd = small()
        .granularity(|properties, _| {
            let exportable = properties.requested_handle_types != CUmemAllocationHandleType::NONE;
            let on_device = properties.location.location_type == CUmemLocationType::DEVICE;
            CHUNK as usize * if exportable { 2 } else { 1 } / if on_device { 1 } else { 16 }
        })
        .hints(Hints::Elsewhere)
        .numa_nodes([NumaNode { id: 1, memory: 1 << 26 }, NumaNode { id: 3, memory: 0 }]);
    [
        ("strict", small()),
        ("measured", small().preset(Preset::Measured)),
        ("pair", pair),
        ("odd", odd),
        ("by hand", small().preset(Preset::Measured).manual_streams()),
    ]
}

fn number_from(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}

#[test]
fn any_calls_get_an_answer_and_leave_nothing_behind() {
    let (calls, seed) = (number_from("CUVMM_CALLS", CALLS as u64) as usize, number_from("CUVMM_SEED", 1));
    let canary = vec![0x5A_u8; 1 << 20];
    let (mut counts, mut provided) = (Counts::new(), BTreeSet::new());
    let before = left();
    for (name, machine) in machines() {
        for threads in [1, THREADS] {
            println!("{name}, {threads} threads, {calls} calls, seed {seed}");
            let simulator = Simulator::new(machine.clone());
            let lasting = lasting(&simulator.driver().unwrap());
            *DRIVER.lock().unwrap() = Some(simulator.clone());
            let (inside, seen) = (INSIDE.load(Ordering::Relaxed), Mutex::new(Seen::default()));
            let run = |thread: usize| {
                let seed = seed.wrapping_mul(THREADS as u64) + thread as u64;
                make_many(&simulator, seed, &seen, lasting, calls / threads)
            };
            std::thread::scope(|scope| {
                let run = &run;
                let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
                for (call, count) in running.into_iter().flat_map(|thread| thread.join().unwrap()) {
                    *counts.entry(call).or_default() += count;
                }
            });

            assert!(canary.iter().all(|&byte| byte == 0x5A));
            provided.extend(Call::ALL.iter().copied().filter(|&call| simulator.provides(call)));
            assert!(INSIDE.load(Ordering::Relaxed) > inside, "host functions ran");
            let live = simulator.live();
            assert!(live.reservations > 0 && live.mappings > 0 && live.allocations > 0, "{live:?}");
            assert!(left().addresses > before.addresses);

            *DRIVER.lock().unwrap() = None;
            drop((simulator, seen));
            let until = Instant::now() + Duration::from_secs(20);
            while left() != before {
                assert!(Instant::now() < until, "{:?} is left of {before:?}", left());
                std::thread::yield_now();
            }
        }
    }
    // By chance a few that are rare may never have.
    let never: Vec<_> = provided.iter().filter(|call| !counts.contains_key(call)).collect();
    assert!(never.len() < 5, "never succeeded: {never:?}");
}
