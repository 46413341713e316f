//! What is counted is what the driver has, after every step and every failure.
//!
//! # Safety
//! What is retained is a mapping of the test's own.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::os::fd::AsFd;
use std::sync::Arc;

use cuvmm_driver::Call;
use cuvmm_driver::sys::{CUdeviceptr, CUmemAllocationHandleType, CUresult};
use cuvmm_handles::{Allocation, Error, Granularity, Level, Mapping, Reservation, Usage};
use cuvmm_sim::{Hints, Machine, When};
use support::{Bench, CODES, G, R};

const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;

/// A bench on which everything is of one size and counted in one place.
struct Counted {
    bench: Bench,
    usage: Arc<Usage>,
}

impl Counted {
    fn presets() -> [Self; 2] {
        Bench::presets().map(Self::new)
    }

    fn new(bench: Bench) -> Self {
        Self { bench, usage: Arc::default() }
    }

    fn addresses(&self) -> Arc<Reservation> {
        Arc::new(Arc::into_inner(self.bench.addresses(1)).unwrap().counted(&self.usage))
    }

    fn memory(&self) -> Arc<Allocation> {
        Arc::new(Arc::into_inner(self.bench.memory_for(1, POSIX)).unwrap().counted(&self.usage))
    }

    fn map(&self, range: &Arc<Reservation>, at: usize, memory: &Arc<Allocation>) -> Result<Mapping, Error> {
        Mapping::map(range, at * G, memory.clone(), self.bench.access())
    }

    fn mapping(&self) -> Mapping {
        self.map(&self.addresses(), 0, &self.memory()).unwrap()
    }

    /// The numbers are the simulator's, and as many values as the driver strands are stranded.
    #[track_caller]
    fn assert_exact(&self) {
        let (live, usage) = (self.bench.simulator.live(), &self.usage);
        assert_eq!(usage.reserved().now, live.reservations * R);
        assert_eq!(usage.mapped().now, live.mappings * G);
        assert_eq!(usage.imported().now, live.imported * G);
        let held = [usage.created(), usage.imported(), usage.retained()];
        assert_eq!(held.map(|level| level.now).iter().sum::<usize>(), live.allocations * G);
        assert_eq!(usage.stranded(), self.bench.driver.stranded().total());
        for level in held.into_iter().chain([usage.reserved(), usage.mapped()]) {
            assert!(level.now <= level.peak, "{level:?}");
        }
    }
}

#[test]
fn every_step_is_counted_once_and_taken_back_once() {
    for counted in Counted::presets() {
        let (bench, usage) = (&counted.bench, &counted.usage);
        let size = Granularity::new(G).unwrap().exact(G).unwrap();
        let range = counted.addresses();
        counted.assert_exact();
        let memory = counted.memory();
        counted.assert_exact();
        let first = counted.map(&range, 0, &memory).unwrap();
        counted.assert_exact();
        let alias = counted.map(&range, 1, &memory).unwrap();
        counted.assert_exact();
        assert_eq!(usage.mapped(), Level { now: 2 * G, peak: 2 * G }, "each mapping of the same memory");

        let descriptor = memory.export_posix_fd().unwrap();
        let imported = Allocation::import_posix_fd(&bench.driver, descriptor.as_fd(), size).unwrap();
        let imported = imported.counted(usage);
        counted.assert_exact();
        // SAFETY: the mapping is this test's, and as long as its allocation.
        let retained = unsafe { Allocation::retain(&bench.driver, alias.address(), size) }.unwrap().counted(usage);
        counted.assert_exact();
        assert_eq!([usage.created(), usage.imported(), usage.retained()], [Level { now: G, peak: G }; 3]);

        first.close().unwrap();
        counted.assert_exact();
        drop(imported);
        counted.assert_exact();
        retained.close().unwrap();
        counted.assert_exact();
        drop((range, memory, descriptor));
        counted.assert_exact();
        alias.close().unwrap();
        counted.assert_exact();
        assert_eq!(usage.reserved(), Level { now: 0, peak: R });
        assert_eq!(usage.mapped(), Level { now: 0, peak: 2 * G });
        assert_eq!((usage.exported(), usage.stranded()), (1, 0));
        bench.assert_clean();
    }
}

#[test]
fn nothing_is_counted_that_the_driver_refused() {
    for code in CODES {
        for counted in Counted::presets() {
            let bench = &counted.bench;
            let (range, memory) = (counted.addresses(), counted.memory());
            for call in [Call::cuMemMap, Call::cuMemSetAccess] {
                bench.faults.fail(call, 1, code, When::Before);
                assert_eq!(counted.map(&range, 0, &memory).unwrap_err().call(), Some(call));
                counted.assert_exact();
            }
            bench.faults.fail(Call::cuMemExportToShareableHandle, 1, code, When::Before);
            assert_eq!(memory.export_posix_fd().unwrap_err().code(), Some(code));
            let mapping = counted.map(&range, 0, &memory).unwrap();
            bench.faults.fail(Call::cuMemGetHandleForAddressRange, 1, code, When::Before);
            assert_eq!(mapping.export_dma_buf().unwrap_err().code(), Some(code));
            assert_eq!(counted.usage.exported(), 0);
            drop((memory.export_posix_fd().unwrap(), mapping.export_dma_buf().unwrap()));
            assert_eq!(counted.usage.exported(), 2);
            drop((range, memory, mapping));
            counted.assert_exact();
            bench.assert_clean();
        }
    }
}

/// Each call that undoes fails, alone and together. What the driver said no to stays in the numbers, also where it was
/// done all the same.
#[test]
fn what_could_not_be_undone_stays_in_the_numbers_and_is_stranded() {
    const CALLS: [Call; 3] = [Call::cuMemUnmap, Call::cuMemRelease, Call::cuMemAddressFree];
    for (failing, when) in (1..8_usize).flat_map(|failing| [(failing, When::Before), (failing, When::After)]) {
        for close in [true, false] {
            for counted in Counted::presets() {
                let mapping = counted.mapping();
                let fails = |index: usize| failing & (1 << index) != 0;
                for (index, call) in CALLS.into_iter().enumerate().filter(|(index, _)| fails(*index)) {
                    counted.bench.faults.fail(call, 1, CODES[index], when);
                }
                if close {
                    mapping.close().unwrap_err();
                } else {
                    drop(mapping);
                }
                let [unmap, release, free] = [fails(0), fails(1), fails(2)];
                let usage = &counted.usage;
                let kept = (usage.mapped().now > 0, usage.created().now > 0, usage.reserved().now > 0);
                assert_eq!(kept, (unmap, release, unmap || free));
                assert_eq!(usage.stranded(), [unmap, release, free && !unmap].map(usize::from).iter().sum::<usize>());
                if when == When::Before {
                    counted.assert_exact();
                }
                // Others are counted beside it.
                let another = Counted { bench: Bench::small(), usage: usage.clone() }.mapping();
                assert_eq!(usage.mapped().now, usize::from(unmap) * G + G);
                another.close().unwrap();
                assert_eq!(usage.mapped().now, usize::from(unmap) * G);
            }
        }
    }
}

#[test]
fn a_mapping_that_is_not_granted_and_can_not_be_taken_away_stays_counted() {
    for counted in Counted::presets() {
        let (range, memory) = (counted.addresses(), counted.memory());
        counted.bench.faults.fail(Call::cuMemSetAccess, 1, CUresult::NOT_PERMITTED, When::Before);
        counted.bench.faults.fail(Call::cuMemUnmap, 1, CUresult::UNKNOWN, When::Before);
        counted.map(&range, 0, &memory).unwrap_err();
        counted.assert_exact();
        assert_eq!((counted.usage.mapped().now, counted.usage.stranded()), (G, 1));
        drop((range, memory));
        counted.assert_exact();
    }
}

#[test]
fn addresses_elsewhere_are_counted_as_long_as_they_are_reserved() {
    let size = Reservation::GRANULARITY.exact(R).unwrap();
    for fails in [false, true] {
        let counted = Counted::new(Bench::new(Machine::small().hints(Hints::Elsewhere)));
        let wanted = CUdeviceptr(1 << 40);
        let range = Reservation::hinted(&counted.bench.driver, size, 0, wanted).unwrap().counted(&counted.usage);
        counted.assert_exact();
        let got = range.address();
        if fails {
            counted.bench.faults.fail(Call::cuMemAddressFree, 1, CUresult::UNKNOWN, When::Before);
        }
        assert_eq!(range.require_at(wanted).unwrap_err(), Error::AddressUnavailable { wanted, got });
        counted.assert_exact();
        assert_eq!(counted.usage.reserved(), Level { now: if fails { R } else { 0 }, peak: R });
    }
}

#[test]
fn what_is_counted_elsewhere_is_no_longer_counted_before() {
    for counted in Counted::presets() {
        let other = Arc::<Usage>::default();
        let again = |range: Arc<Reservation>, usage| Arc::into_inner(range).unwrap().counted(usage);
        let range = Arc::new(again(Arc::new(again(counted.addresses(), &other)), &counted.usage));
        let memory = Arc::into_inner(counted.memory()).unwrap().counted(&other).counted(&counted.usage);
        let memory = Arc::new(memory.counted(&counted.usage));
        counted.assert_exact();
        assert_eq!([other.reserved(), other.created()], [Level { now: 0, peak: R }, Level { now: 0, peak: G }]);
        assert_eq!([counted.usage.reserved().peak, counted.usage.created().peak], [R, G], "never twice");
        counted.map(&range, 0, &memory).unwrap().close().unwrap();
        assert_eq!((counted.usage.mapped().peak, other.mapped().peak), (G, 0));
        drop((range, memory));
        counted.assert_exact();
    }
}

/// As the driver's own count: the process ends, and that gives back everything.
#[test]
fn after_the_driver_has_shut_down_nothing_is_stranded_and_nothing_taken_back() {
    let counted = Counted::new(Bench::small());
    let mappings = [counted.mapping(), counted.mapping()];
    counted.bench.simulator.shut_down();
    let [closed, dropped] = mappings;
    closed.close().unwrap_err();
    drop(dropped);
    counted.assert_exact();
    assert_eq!((counted.usage.mapped().now, counted.usage.stranded()), (2 * G, 0));
}

#[test]
fn threads_that_map_and_let_go_leave_exact_numbers() {
    const THREADS: usize = 4;
    let counted = Counted::new(Bench::small());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let counted = &counted;
            scope.spawn(move || {
                for round in 0..50 {
                    let mapping = counted.mapping();
                    if (thread + round) % 2 == 0 { mapping.close().unwrap() } else { drop(mapping) }
                }
            });
        }
    });
    counted.assert_exact();
    let usage = &counted.usage;
    for (level, unit) in [(usage.reserved(), R), (usage.mapped(), G), (usage.created(), G)] {
        assert!(level.now == 0 && level.peak >= unit && level.peak <= THREADS * unit, "{level:?}");
    }
    counted.bench.assert_clean();
}
