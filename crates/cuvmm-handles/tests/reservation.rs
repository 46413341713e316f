//! Reservations and rooms: refused before the call what no driver may see, freed by their own pair, never shared out
//! twice.

mod support;

use std::sync::{Arc, Mutex, PoisonError};

use cuvmm_driver::sys::{CUdeviceptr, CUresult};
use cuvmm_driver::{Call, Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_handles::{Error, Granularity, Mapping, Reservation, Room};
use cuvmm_sim::{Hints, Machine, Simulator, When};
use proptest::prelude::*;
use support::{Bench, CODES, G, R};

#[test]
fn sizes_and_alignments_that_no_driver_takes_reach_none() {
    let bench = Bench::small();
    let fine = Granularity::new(G).unwrap();
    let reserve = |bytes, alignment| Reservation::reserve(&bench.driver, fine.exact(bytes).unwrap(), alignment);
    for bytes in [0, G, R - G, R + G] {
        let refused = Error::NotGranular { bytes, granularity: R };
        assert_eq!(reserve(bytes, 0).unwrap_err(), refused, "{bytes}");
        let hint = CUdeviceptr(1 << 40);
        assert_eq!(Reservation::at(&bench.driver, fine.exact(bytes).unwrap(), hint).unwrap_err(), refused);
    }
    for alignment in [3, R + 1, usize::MAX] {
        assert_eq!(reserve(R, alignment).unwrap_err(), Error::Alignment { alignment });
    }
    bench.assert_no_call();
}

#[test]
fn the_base_is_aligned_as_asked() {
    for bench in Bench::presets() {
        let size = Reservation::GRANULARITY.exact(R).unwrap();
        for alignment in [0, 1 << 21, 1 << 25, 1 << 32] {
            let range = Reservation::reserve(&bench.driver, size, alignment).unwrap();
            assert_eq!(range.address().0 % alignment.max(R) as u64, 0);
            assert_eq!((range.size(), range.driver()), (R, &bench.driver));
        }
        bench.assert_clean();
    }
}

#[test]
fn exactly_these_addresses_or_none() {
    let size = Reservation::GRANULARITY.exact(R).unwrap();
    for (hints, granted) in [(Hints::Granted, true), (Hints::Elsewhere, false)] {
        let bench = Bench::new(Machine::small().hints(hints));
        let first = bench.addresses(1);
        // Free, and not where the driver would put the next one by itself.
        let free = CUdeviceptr(first.address().0 + 64 * R as u64);
        match Reservation::at(&bench.driver, size, free) {
            Ok(range) => assert!(granted && range.address() == free),
            Err(Error::AddressUnavailable { wanted, got }) => assert!(!granted && wanted == free && got != wanted),
            Err(other) => panic!("{other}"),
        }
        let taken = Reservation::at(&bench.driver, size, first.address()).unwrap_err();
        assert!(matches!(taken, Error::AddressUnavailable { wanted, .. } if wanted == first.address()));
        assert_eq!(bench.simulator.live().reservations, 1, "what was not wanted is free again");
        drop(first);
        bench.assert_clean();
    }
    let bench = Bench::new(Machine::small().hints(Hints::Refused(CUresult::NOT_SUPPORTED)));
    let refused = Reservation::at(&bench.driver, size, CUdeviceptr(1 << 41)).unwrap_err();
    assert_eq!((refused.call(), refused.code()), (Some(Call::cuMemAddressReserve), Some(CUresult::NOT_SUPPORTED)));
    bench.assert_clean();
}

/// Notes every pair that is given to a free.
#[derive(Clone, Default)]
struct Frees(Arc<Mutex<Vec<(u64, u64)>>>);

impl Hook for Frees {
    fn after(&self, invocation: &Invocation<'_>, _: CUresult) -> Option<Failure> {
        if let (Call::cuMemAddressFree, [address, size]) = (invocation.call, invocation.arguments) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push((*address, *size));
        }
        None
    }
}

#[test]
fn neighbours_are_freed_each_by_its_own_pair() {
    let (simulator, frees) = (Simulator::new(Machine::small()), Frees::default());
    let driver = Driver::new(Hooked::new(simulator.clone(), frees.clone())).unwrap();
    let mut ranges: Vec<Reservation> = Vec::new();
    for units in 1..=6 {
        let size = Reservation::GRANULARITY.exact(units * R).unwrap();
        ranges.push(match ranges.last() {
            None => Reservation::reserve(&driver, size, 0).unwrap(),
            Some(last) => {
                let end = last.address().checked_add(last.size()).unwrap();
                Reservation::at(&driver, size, end).unwrap()
            }
        });
    }
    let mut pairs: Vec<_> = ranges.iter().map(|range| (range.address().0, range.size() as u64)).collect();
    for (index, range) in ranges.into_iter().enumerate() {
        if index % 2 == 0 { range.close().unwrap() } else { drop(range) }
    }
    let mut freed = frees.0.lock().unwrap().clone();
    pairs.sort_unstable();
    freed.sort_unstable();
    assert_eq!(freed, pairs);
    assert!(simulator.live().is_empty());
}

#[test]
fn a_failed_free_is_told_once_counted_once_and_not_tried_again() {
    for code in CODES {
        let bench = Bench::small();
        let [closed, dropped] = [(); 2].map(|()| Arc::into_inner(bench.addresses(1)).unwrap());
        bench.faults.fail(Call::cuMemAddressFree, 1, code, When::Before);
        bench.faults.fail(Call::cuMemAddressFree, 2, code, When::Before);
        let error = closed.close().unwrap_err();
        assert_eq!((error.call(), error.code()), (Some(Call::cuMemAddressFree), Some(code)));
        assert_eq!(bench.stranded(), [1, 0, 0, 0]);
        drop(dropped);
        assert_eq!(bench.stranded(), [2, 0, 0, 0]);
        assert_eq!((bench.faults.fired(), bench.count(Call::cuMemAddressFree)), (2, 0));
        assert_eq!(bench.simulator.live().reservations, 2);
    }
}

#[test]
fn a_reservation_that_a_failed_call_did_make_is_all_that_is_lost() {
    let size = Reservation::GRANULARITY.exact(R).unwrap();
    for code in CODES {
        for (when, lost) in [(When::Before, 0), (When::After, 1)] {
            let bench = Bench::small();
            bench.faults.fail(Call::cuMemAddressReserve, 1, code, when);
            let error = Reservation::reserve(&bench.driver, size, 0).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(Call::cuMemAddressReserve), Some(code)));
            assert_eq!((bench.simulator.live().reservations, bench.stranded()), (lost, [0; 4]));
        }
    }
}

#[test]
fn after_the_driver_has_shut_down_letting_go_is_quiet() {
    let bench = Bench::small();
    let [closed, dropped] = [(); 2].map(|()| Arc::into_inner(bench.addresses(1)).unwrap());
    bench.simulator.shut_down();
    assert_eq!(closed.close().unwrap_err().code(), Some(CUresult::DEINITIALIZED));
    drop(dropped);
    assert_eq!(bench.stranded(), [0; 4]);
}

#[test]
fn a_room_lies_within_its_reservation_and_overlaps_no_other() {
    let bench = Bench::small();
    let range = bench.addresses(1);
    bench.simulator.clear_calls();
    let check = |offset: usize, size: usize, expect: Option<Error>| {
        assert_eq!(range.take(offset, size).err(), expect, "{size} at {offset}");
    };
    let out = |offset, size| Some(Error::OutOfBounds { offset, size, reserved: R });
    let taken = |offset, size| Some(Error::AlreadyMapped { offset, size });
    check(0, 0, Some(Error::NotGranular { bytes: 0, granularity: R }));
    for (offset, size) in
        [(0, R + 1), (1, R), (R, 1), (R - G, 2 * G), (usize::MAX, 1), (1, usize::MAX), (usize::MAX, usize::MAX)]
    {
        check(offset, size, out(offset, size));
    }
    check(0, R, None);

    let middle = range.take(4 * G, 2 * G).unwrap();
    assert_eq!((middle.offset(), middle.size()), (4 * G, 2 * G));
    assert_eq!(middle.address().0, range.address().0 + 4 * G as u64);
    assert!(Arc::ptr_eq(middle.reservation(), &range));
    for (offset, size) in [(4 * G, 2 * G), (3 * G, 2 * G), (5 * G, G), (0, R), (4 * G, 1), (6 * G - 1, 1)] {
        check(offset, size, taken(offset, size));
    }
    for (offset, size) in [(3 * G, G), (6 * G, G), (0, 4 * G), (6 * G, R - 6 * G)] {
        check(offset, size, None);
    }
    drop(middle);
    check(0, R, None);
    bench.assert_no_call();
}

#[test]
fn a_room_keeps_its_reservation() {
    let bench = Bench::small();
    let room = bench.addresses(1).take(0, G).unwrap();
    assert_eq!(bench.simulator.live().reservations, 1);
    drop(room);
    bench.assert_clean();
}

/// Eight threads take and give back; what is theirs at one time is marked, so that any overlap is seen.
#[test]
fn threads_never_hold_rooms_that_overlap() {
    use std::sync::atomic::{AtomicUsize, Ordering};

    const UNITS: usize = R / G;
    let bench = Bench::small();
    let range = bench.addresses(1);
    let owners: Vec<AtomicUsize> = (0..UNITS).map(|_| AtomicUsize::new(0)).collect();
    let granted = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 1..=8_usize {
            let (range, owners, granted) = (&range, &owners, &granted);
            scope.spawn(move || {
                let mut state = thread as u64;
                for _ in 0..5_000 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let (start, length) = ((state >> 33) as usize % UNITS, 1 + (state >> 50) as usize % 4);
                    let Ok(room) = range.take(start * G, length * G) else { continue };
                    granted.fetch_add(1, Ordering::Relaxed);
                    for owner in &owners[start..start + length] {
                        assert_eq!(owner.swap(thread, Ordering::Relaxed), 0, "somebody else's");
                    }
                    for owner in &owners[start..start + length] {
                        assert_eq!(owner.swap(0, Ordering::Relaxed), thread, "taken away");
                    }
                    drop(room);
                }
            });
        }
    });
    assert!(granted.into_inner() > 1_000, "most are granted");
    assert!(range.take(0, R).is_ok(), "all of it is free again");
}

#[test]
fn a_mapping_that_ends_leaves_its_room_to_the_next() {
    let bench = Bench::small();
    let range = bench.addresses(1);
    for _ in 0..3 {
        let mapping = Mapping::map(&range, G, bench.memory(2), bench.access()).unwrap();
        assert_eq!(range.take(2 * G, G).unwrap_err(), Error::AlreadyMapped { offset: 2 * G, size: G });
        mapping.close().unwrap();
    }
    drop(range);
    bench.assert_clean();
}

#[derive(Clone, Debug)]
enum Step {
    Take { offset: usize, size: usize },
    Drop(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..R + 3, 0..R / 4).prop_map(|(offset, size)| Step::Take { offset, size }),
        2 => any::<usize>().prop_map(Step::Drop),
    ]
}

proptest! {
    #[test]
    fn rooms_are_what_a_list_of_intervals_says(steps in prop::collection::vec(step(), 1..120)) {
        let bench = Bench::small();
        let range = bench.addresses(1);
        let mut rooms: Vec<Room> = Vec::new();
        for step in steps {
            match step {
                Step::Take { offset, size } => {
                    let end = offset + size;
                    let overlaps = rooms.iter().any(|room| room.offset() < end && offset < room.offset() + room.size());
                    match range.take(offset, size) {
                        Ok(room) => {
                            prop_assert!(size > 0 && end <= R && !overlaps);
                            prop_assert_eq!((room.offset(), room.size()), (offset, size));
                            rooms.push(room);
                        }
                        Err(Error::NotGranular { .. }) => prop_assert_eq!(size, 0),
                        Err(Error::OutOfBounds { .. }) => prop_assert!(end > R),
                        Err(error) => {
                            prop_assert_eq!(error, Error::AlreadyMapped { offset, size });
                            prop_assert!(overlaps);
                        }
                    }
                }
                Step::Drop(which) if !rooms.is_empty() => drop(rooms.swap_remove(which % rooms.len())),
                Step::Drop(_) => {}
            }
        }
        drop(rooms);
        prop_assert!(range.take(0, R).is_ok());
    }
}
