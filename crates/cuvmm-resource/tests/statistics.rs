//! What a resource counts is what the driver has, after every step, also after failures.
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::cell::Cell;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use cuvmm_driver::sys::CUstreamCaptureMode;
use cuvmm_driver::{CUresult, Call, Driver, Hooked, StrandedKind};
use cuvmm_handles::Allocation;
use cuvmm_resource::{
    Error, GrowOptions, HandleKind, Level, Options, Outcome, Release, Statistics, StreamRef, VirtualMemoryBuffer,
    VirtualMemoryResource,
};
use cuvmm_sim::faults::Both;
use cuvmm_sim::{Faults, Hints, Ledger, Machine, Preset, Simulator, When};
use support::work::in_host_function;
use support::{Bench, G, R};

/// A resource whose chunks are all of one granule, so that numbers of chunks are numbers of bytes; and what the driver
/// says to compare it with.
struct Counted {
    simulator: Simulator,
    driver: Driver,
    faults: Faults,
    ledger: Ledger,
    resource: VirtualMemoryResource,
    reserved: Cell<usize>,
    /// What is alive but the resource's.
    imported_elsewhere: usize,
}

impl Counted {
    fn new(preset: Preset) -> Self {
        Self::of_kind(preset, HandleKind::PosixFd)
    }

    fn of_kind(preset: Preset, kind: HandleKind) -> Self {
        let simulator = Simulator::new(Machine::small().preset(preset));
        let (faults, ledger) = (Faults::new(), Ledger::new());
        let hook = Both { outer: ledger.clone(), inner: faults.clone() };
        let driver = Driver::new(Hooked::new(simulator.clone(), hook)).unwrap();
        let options = Options::new().max_chunk(G).handle_kind(kind);
        let resource = VirtualMemoryResource::new(&driver.device(0).unwrap(), options).unwrap();
        ledger.clear_calls();
        Self { simulator, driver, faults, ledger, resource, reserved: Cell::default(), imported_elsewhere: 0 }
    }

    fn presets() -> [Self; 2] {
        [Preset::Strict, Preset::Measured].map(Self::new)
    }

    /// How many bytes of addresses are reserved, by the calls that succeeded since this was asked last.
    fn reserved(&self) -> usize {
        let mut reserved = self.reserved.get();
        for made in self.ledger.log().iter().filter(|made| made.result.is_success()) {
            match made.call {
                Call::cuMemAddressReserve => reserved += made.arguments[1] as usize,
                Call::cuMemAddressFree => reserved -= made.arguments[1] as usize,
                _ => {}
            }
        }
        self.ledger.clear_calls();
        self.reserved.set(reserved);
        reserved
    }

    /// Once nothing is pending any more.
    #[track_caller]
    fn assert_exact(&self) -> Statistics {
        self.resource.drain(Instant::now() + Duration::from_secs(20)).unwrap();
        let (live, statistics) = (self.simulator.live(), self.resource.statistics());
        assert_eq!(statistics.reserved.now, self.reserved());
        assert_eq!(statistics.mapped.now, live.mappings * G);
        assert_eq!(statistics.imported.now, (live.imported - self.imported_elsewhere) * G);
        let held = [statistics.physical, statistics.imported, statistics.retained];
        let sum: usize = held.iter().map(|level| level.now).sum();
        assert_eq!(sum, (live.allocations - self.imported_elsewhere) * G);
        let kinds = [StrandedKind::Reservation, StrandedKind::Allocation, StrandedKind::Mapping, StrandedKind::Buffer];
        let stranded: usize = kinds.into_iter().map(|kind| self.driver.stranded().count(kind)).sum();
        assert_eq!(statistics.stranded, stranded);
        for level in held.into_iter().chain([statistics.reserved, statistics.mapped]) {
            assert!(level.now <= level.peak, "{statistics:?}");
        }
        statistics
    }

    fn shared(&self, buffer: &VirtualMemoryBuffer) -> Result<VirtualMemoryBuffer, Error> {
        let chunks = buffer.chunks().iter().map(|chunk| chunk.size).collect::<Vec<_>>();
        let mappings = buffer.mappings();
        self.resource.map_chunks(&chunks, buffer.size(), |chunk, size| {
            let handle = mappings[chunk].allocation().export_posix_fd()?;
            Ok(Allocation::import_posix_fd(&self.driver, handle.as_fd(), size)?)
        })
    }
}

/// Numbers of what was done.
fn counts(statistics: Statistics) -> [usize; 7] {
    let Statistics { buffers, allocations, grows_covered, grows_in_place, grows_moved, grows_refused, .. } = statistics;
    [buffers, allocations, grows_covered, grows_in_place, grows_moved, grows_refused, statistics.truncations]
}

#[test]
fn every_step_is_counted_as_the_driver_does() {
    for counted in Counted::presets() {
        let resource = &counted.resource;
        assert_eq!(counted.assert_exact(), Statistics::default(), "what is tried out when it is made is not counted");

        let empty = resource.allocate(0).unwrap();
        let first = resource.allocate_with_capacity(2 * G, 40 << 20).unwrap();
        assert_eq!(counts(counted.assert_exact()), [2, 2, 0, 0, 0, 0, 0]);
        let larger = first.grow(4 * G).unwrap();
        assert_eq!(counts(counted.assert_exact()), [3, 2, 0, 1, 0, 0, 0]);
        let same = larger.grow(3 * G).unwrap();
        assert_eq!(counts(counted.assert_exact()), [4, 2, 1, 1, 0, 0, 0]);
        // The room behind the first is the larger one's.
        assert!(matches!(first.grow_in_place(4 * G), Err(Error::WouldMove { .. })));
        assert_eq!(counts(counted.assert_exact()), [4, 2, 1, 1, 0, 1, 0]);
        let moved = first.grow_with(4 * G, &GrowOptions::new().zeroed()).unwrap();
        assert_eq!(moved.outcome(), Some(Outcome::Moved));
        let statistics = counted.assert_exact();
        assert_eq!(counts(statistics), [5, 2, 1, 1, 1, 1, 0]);
        assert_eq!((statistics.mapped.now, statistics.physical.now), (8 * G, 6 * G));

        let imported = counted.shared(&larger).unwrap();
        let statistics = counted.assert_exact();
        assert_eq!((statistics.exported_handles, statistics.imported.now), (4, 4 * G));
        let head = imported.truncate(G).unwrap();
        assert_eq!(counts(counted.assert_exact()), [7, 3, 1, 1, 1, 1, 1]);
        let head = head.grow_into(2 * G).unwrap();
        let moved = moved.truncate_into(G).unwrap();
        assert_eq!(counts(counted.assert_exact()), [7, 3, 1, 1, 1 + 1, 1, 2]);
        let zeroed = resource.allocate_zeroed(G).unwrap();
        let ahead = resource.allocate_zeroed_with_capacity(G, 2 * G).unwrap();
        assert_eq!(counts(counted.assert_exact()), [9, 5, 1, 1, 2, 1, 2]);

        for buffer in [empty, first, larger, same, imported] {
            buffer.close().unwrap();
            counted.assert_exact();
        }
        for buffer in [head, moved, zeroed, ahead] {
            drop(buffer);
            counted.assert_exact();
        }
        let end = counted.assert_exact();
        assert_eq!(counts(end), [0, 5, 1, 1, 2, 1, 2]);
        for level in [end.reserved, end.mapped, end.physical, end.imported] {
            assert!(level.now == 0 && level.peak > 0, "{end:?}");
        }
        assert_eq!((end.physical.peak, end.retained, end.stranded), (7 * G, Level::default(), 0));
        assert!(end.reserved.peak.is_multiple_of(R));
        assert_eq!(counted.simulator.violations(), []);
    }
}

const CODES: [CUresult; 3] = [CUresult::OUT_OF_MEMORY, CUresult::UNKNOWN, CUresult::NOT_PERMITTED];

type Operation = fn(&Counted, VirtualMemoryBuffer) -> Result<(), Error>;

/// Each takes a buffer of two chunks with room for two more, which an alias grew into where it has to move.
const OPERATIONS: [(&str, Operation); 12] = [
    ("allocate", |counted, _| counted.resource.allocate(2 * G).map(drop)),
    ("allocate_with_capacity", |counted, _| counted.resource.allocate_with_capacity(2 * G, 1 << 30).map(drop)),
    ("allocate_zeroed", |counted, _| counted.resource.allocate_zeroed(2 * G).map(drop)),
    ("grow", |_, buffer| buffer.grow(4 * G).map(drop)),
    ("grow zeroed", |_, buffer| buffer.grow_with(4 * G, &GrowOptions::new().zeroed()).map(drop)),
    ("grow moved", |counted, buffer| {
        let _alias = ahead_of(counted, &buffer)?;
        buffer.grow(4 * G).map(drop)
    }),
    ("grow_into moved", |counted, buffer| {
        let _alias = ahead_of(counted, &buffer)?;
        buffer.grow_into(4 * G).map(drop).map_err(|error| error.into_parts().0)
    }),
    ("truncate_into", |_, buffer| buffer.truncate_into(G).map(drop).map_err(|error| error.into_parts().0)),
    ("truncate_into nothing", |_, buffer| buffer.truncate_into(0).map(drop).map_err(|error| error.into_parts().0)),
    ("import", |counted, buffer| counted.shared(&buffer).map(drop)),
    ("close", |_, buffer| buffer.close().map_err(|error| error.into_parts().0)),
    ("drop", |_, buffer| {
        drop(buffer);
        Ok(())
    }),
];

/// Grows an alias, of which no call fails.
fn ahead_of(counted: &Counted, buffer: &VirtualMemoryBuffer) -> Result<VirtualMemoryBuffer, Error> {
    let fired = counted.faults.fired();
    let alias = buffer.grow(3 * G)?;
    assert!(counted.faults.fired() == fired || alias.outcome() == Some(Outcome::Moved));
    Ok(alias)
}

/// Each call of each operation fails, with nothing done. The numbers stay the driver's: what was not done is not in them,
/// what could not be undone is, and is stranded.
#[test]
fn after_a_failure_of_any_call_the_numbers_are_the_drivers() {
    let failures: usize = std::thread::scope(|scope| {
        let each = OPERATIONS.map(|(name, operation)| scope.spawn(move || fail_each_call(name, operation)));
        each.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(failures > 500, "{failures}");
}

/// How many calls failed.
fn fail_each_call(name: &str, operation: Operation) -> usize {
    let mut failures = 0;
    // Memory that can be shared takes an open file each, and what is stranded keeps it.
    let kind = if name == "import" { HandleKind::PosixFd } else { HandleKind::None };
    let presets = [Preset::Strict, Preset::Measured];
    for (code, preset) in CODES.into_iter().flat_map(|code| presets.map(|preset| (code, preset))) {
        let counted = &Counted::of_kind(preset, kind);
        for nth in 1.. {
            let start = counted.assert_exact();
            let buffer = counted.resource.allocate_with_capacity(2 * G, 4 * G).unwrap();
            buffer.fill(0, G, 1).unwrap();
            let (before, fired) = (counted.assert_exact(), counted.faults.fired());
            counted.faults.fail_any(nth, code, When::Before);
            let told = operation(counted, buffer);
            let fired = counted.faults.fired() - fired;
            counted.faults.clear();
            let after = counted.assert_exact();
            assert_eq!(after.buffers, 0, "{name}, call {nth}");
            if told.is_err() {
                assert_eq!(after.allocations, before.allocations, "{name}, call {nth}: {told:?}");
            }
            if fired == 0 {
                assert!(told.is_ok() && nth > 3, "{name} takes {nth} calls: {told:?}");
                let now = |statistics: Statistics| {
                    [statistics.mapped, statistics.physical, statistics.reserved].map(|level| level.now)
                };
                assert_eq!((now(after), after.stranded), (now(start), start.stranded), "{name}");
                break;
            }
            failures += 1;
        }
    }
    failures
}

/// Where the addresses behind a buffer are somebody else's, others are given, and given back.
#[test]
fn addresses_that_were_not_wanted_and_can_not_be_freed_stay_counted() {
    for code in CODES {
        let bench = Bench::new(Machine::small().hints(Hints::Elsewhere));
        let resource = bench.plain();
        let buffer = resource.allocate(G).unwrap();
        let before = resource.statistics();
        bench.faults.fail(Call::cuMemAddressFree, 1, code, When::Before);
        let moved = buffer.grow(buffer.capacity() + G).unwrap();
        assert_eq!(moved.outcome(), Some(Outcome::Moved));
        let after = resource.statistics();
        assert_eq!((before.stranded, after.stranded), (0, 1));
        moved.close().unwrap();
        buffer.close().unwrap();
        // What was reserved behind it was as large as what the buffer itself has.
        assert_eq!(resource.statistics().reserved.now, before.reserved.now);
        assert_eq!(bench.simulator.live().reservations, 1);
    }
}

#[test]
fn a_chunk_made_by_another_resource_counts_there_and_its_addresses_with_the_buffer() {
    for counted in Counted::presets() {
        let options = Options::new().max_chunk(G).handle_kind(HandleKind::PosixFd);
        let other = VirtualMemoryResource::new(counted.resource.device(), options).unwrap();
        let buffer = counted.resource.allocate_with_capacity(G, 8 * G).unwrap();
        let buffer = buffer.grow_into_with(3 * G, &GrowOptions::new().chunk_of(&other)).unwrap();
        let (one, two) = (counted.resource.statistics(), other.statistics());
        assert_eq!((one.physical.now, one.mapped.now), (G, 3 * G));
        assert_eq!((two.physical.now, two.mapped.now, two.reserved.now), (2 * G, 0, 0));
        assert_eq!((one.grows_in_place, two.grows_in_place, two.buffers), (1, 0, 0));
        buffer.close().unwrap();
        assert_eq!((counted.resource.statistics().physical.now, other.statistics().physical.now), (0, 0));
        counted.assert_exact();
    }
}

#[test]
fn a_buffer_that_can_not_be_waited_for_is_pending_until_it_can() {
    for counted in Counted::presets() {
        let device = counted.resource.device();
        let stream = StreamRef::create(device).unwrap();
        let buffer = counted.resource.allocate(3 * G).unwrap();
        buffer.set_release(Release::Stream(stream.clone())).unwrap();
        // SAFETY: the stream is alive, and the capture ends below.
        unsafe { counted.driver.stream_begin_capture(stream.as_raw(), CUstreamCaptureMode::RELAXED) }.unwrap();
        drop(buffer);
        let statistics = counted.resource.statistics();
        assert_eq!((statistics.pending, statistics.buffers, statistics.mapped.now), (1, 0, 3 * G));
        // SAFETY: the capture began above.
        let graph = unsafe { counted.driver.stream_end_capture(stream.as_raw()) }.unwrap();
        // SAFETY: nothing was made of it.
        unsafe { counted.driver.graph_destroy(graph) }.unwrap();
        let statistics = counted.assert_exact();
        assert_eq!((statistics.pending, statistics.stranded, statistics.mapped.now), (0, 0, 0));

        let buffer = counted.resource.allocate(2 * G).unwrap();
        in_host_function(&stream, move || drop(buffer));
        let statistics = counted.assert_exact();
        assert_eq!((statistics.pending, statistics.stranded, statistics.mapped.now), (0, 0, 0));
    }
}

/// The driver refuses to say whether work is over, again and again: it may be running.
#[test]
fn a_buffer_of_which_it_can_not_be_found_out_is_stranded_once_and_stays_counted() {
    for counted in Counted::presets() {
        let buffer = counted.resource.allocate(3 * G).unwrap();
        buffer.set_release(Release::Stream(StreamRef::create(counted.resource.device()).unwrap())).unwrap();
        counted.faults.fail_when(Call::cuEventRecord, |_| true, CUresult::UNKNOWN, When::Before);
        buffer.close_deferred();
        let statistics = counted.assert_exact();
        counted.faults.clear();
        assert_eq!((statistics.stranded, statistics.buffers, statistics.mapped.now), (1, 0, 3 * G));
    }
}

#[test]
fn memory_that_is_imported_by_others_is_not_counted() {
    for mut counted in Counted::presets() {
        let buffer = counted.resource.allocate(2 * G).unwrap();
        let handle = buffer.mappings()[0].allocation().export_posix_fd().unwrap();
        let size = counted.resource.granularity().exact(G).unwrap();
        let imported = Allocation::import_posix_fd(&counted.driver, handle.as_fd(), size).unwrap();
        counted.imported_elsewhere = 1;
        assert_eq!(counted.assert_exact().exported_handles, 1);
        buffer.close().unwrap();
        assert_eq!(counted.assert_exact().physical.now, 0, "another holds it, who is not counted");
        imported.close().unwrap();
    }
}

#[test]
fn threads_that_allocate_grow_and_let_go_leave_exact_numbers() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 40;
    let counted = Counted::new(Preset::Measured);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let resource = &counted.resource;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let buffer = resource.allocate(G).unwrap().grow_into(2 * G).unwrap();
                    let head = buffer.truncate(G).unwrap();
                    if (thread + round) % 2 == 0 {
                        buffer.close().unwrap()
                    } else {
                        drop(buffer)
                    }
                    head.close().unwrap();
                }
            });
        }
    });
    let end = counted.assert_exact();
    let all = THREADS * ROUNDS;
    assert_eq!((end.buffers, end.allocations, end.truncations), (0, all, all));
    assert_eq!((end.grows_in_place, end.mapped.now, end.physical.now, end.reserved.now), (all, 0, 0, 0));
    assert!(end.mapped.peak >= 2 * G && end.mapped.peak <= THREADS * 2 * G, "{end:?}");
}
