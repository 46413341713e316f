//! Mappings: what they own, what they refuse, and what is left of them when a call fails.

mod support;

use std::sync::Arc;

use cuvmm_driver::Call;
use cuvmm_driver::sys::{CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemLocation, CUresult};
use cuvmm_handles::{Allocation, Error, Granularity, Mapping, Reservation};
use cuvmm_sim::{Machine, Preset, When};
use support::{Bench, CODES, G, R};

const DIFFERENT: Error = Error::Driver(cuvmm_driver::Error::DifferentDrivers);

#[test]
fn a_mapping_is_the_whole_of_its_memory_with_its_access() {
    for bench in Bench::presets() {
        let (range, memory, access) = (bench.addresses(1), bench.memory(3), bench.access());
        let mapping = Mapping::map(&range, 2 * G, memory.clone(), access.clone()).unwrap();
        assert_eq!((mapping.address().0, mapping.size()), (range.address().0 + 2 * G as u64, 3 * G));
        assert_eq!((mapping.driver(), mapping.access()), (&bench.driver, &access));
        assert_eq!((mapping.room().offset(), mapping.room().size()), (2 * G, 3 * G));
        assert!(Arc::ptr_eq(mapping.allocation(), &memory));
        let granted = bench.driver.mem_get_access(access[0].location, mapping.address()).unwrap();
        assert_eq!(granted, CUmemAccess_flags::READWRITE);
        drop((range, memory, mapping));
        bench.assert_clean();
    }
}

#[test]
fn an_empty_access_list_makes_no_access_call() {
    let bench = Bench::small();
    let mapping = Mapping::map(&bench.addresses(1), 0, bench.memory(1), Arc::new([])).unwrap();
    assert_eq!(bench.count(Call::cuMemSetAccess), 0);
    let granted = bench.driver.mem_get_access(bench.access()[0].location, mapping.address()).unwrap();
    assert_eq!(granted, CUmemAccess_flags::NONE);
    drop(mapping);
    bench.assert_clean();
}

#[test]
fn memory_is_mapped_at_any_number_of_addresses() {
    for bench in Bench::presets() {
        let (range, memory) = (bench.addresses(1), bench.memory(1));
        let map = |at| Mapping::map(&range, at * G, memory.clone(), bench.access()).unwrap();
        let mappings: Vec<_> = (0..R / G).map(map).collect();
        assert_eq!((bench.simulator.live().mappings, bench.simulator.physical_bytes(0)), (R / G, G));
        drop((range, memory));
        for mapping in mappings {
            assert_eq!(bench.simulator.physical_bytes(0), G, "as long as one is there");
            mapping.close().unwrap();
        }
        bench.assert_clean();
    }
}

/// Teardown is right in whatever order the owners let go.
#[test]
fn every_order_of_letting_go_ends_clean() {
    enum Owner {
        Addresses(Arc<Reservation>),
        Memory(Arc<Allocation>),
        Mapped(Mapping),
    }
    for close in [true, false] {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            for bench in Bench::presets() {
                let (range, memory) = (bench.addresses(1), bench.memory(2));
                let mapping = Mapping::map(&range, 0, memory.clone(), bench.access()).unwrap();
                let mut owners = [Owner::Addresses(range), Owner::Memory(memory), Owner::Mapped(mapping)].map(Some);
                bench.simulator.clear_calls();
                for index in order {
                    match owners[index].take().unwrap() {
                        Owner::Mapped(mapping) if close => mapping.close().unwrap(),
                        Owner::Mapped(mapping) => drop(mapping),
                        // A share that isn't the last is nothing to close.
                        Owner::Addresses(range) => drop(range),
                        Owner::Memory(memory) => drop(memory),
                    }
                    let live = bench.simulator.live();
                    let mapped = owners[2].is_some();
                    assert_eq!(live.mappings, usize::from(mapped));
                    assert_eq!(live.reservations, usize::from(mapped || owners[0].is_some()));
                    assert_eq!(live.allocations, usize::from(mapped || owners[1].is_some()));
                }
                let calls = bench.simulator.calls();
                assert_eq!(calls.len(), 3, "{calls:?}");
                let at = |call| calls.iter().position(|made| *made == call).unwrap();
                assert!(
                    at(Call::cuMemUnmap) < at(Call::cuMemAddressFree) && at(Call::cuMemUnmap) < at(Call::cuMemRelease)
                );
                bench.assert_clean();
            }
        }
    }
}

#[test]
fn a_mapping_stays_within_its_reservation_though_a_neighbour_begins_there() {
    for bench in Bench::presets() {
        let first = bench.addresses(1);
        let size = Reservation::GRANULARITY.exact(R).unwrap();
        let end = first.address().checked_add(R).unwrap();
        let neighbour = Arc::new(Reservation::at(&bench.driver, size, end).unwrap());
        let memory = bench.memory(2);
        bench.simulator.clear_calls();
        for offset in [R - G, R, usize::MAX - G, usize::MAX] {
            let error = Mapping::map(&first, offset, memory.clone(), bench.access()).unwrap_err();
            assert_eq!(error, Error::OutOfBounds { offset, size: 2 * G, reserved: R });
        }
        bench.assert_no_call();
        let mapping = Mapping::map(&neighbour, 0, memory, bench.access()).unwrap();
        drop((first, neighbour, mapping));
        bench.assert_clean();
    }
}

#[test]
fn a_second_mapping_over_the_first_reaches_no_driver() {
    let bench = Bench::small();
    let (range, memory) = (bench.addresses(1), bench.memory(2));
    let mapping = Mapping::map(&range, 2 * G, memory.clone(), bench.access()).unwrap();
    bench.simulator.clear_calls();
    for offset in [G, 2 * G, 3 * G] {
        let error = Mapping::map(&range, offset, memory.clone(), bench.access()).unwrap_err();
        assert_eq!(error, Error::AlreadyMapped { offset, size: 2 * G });
    }
    bench.assert_no_call();
    drop((range, memory, mapping));
    bench.assert_clean();
}

#[test]
fn values_of_two_drivers_reach_neither() {
    let [one, other] = [Bench::small(), Bench::small()];
    let (range, memory) = (one.addresses(1), other.memory(1));
    one.simulator.clear_calls();
    other.simulator.clear_calls();
    assert_eq!(Mapping::map(&range, 0, memory.clone(), one.access()).unwrap_err(), DIFFERENT);
    let room = range.take(0, G).unwrap();
    assert_eq!(Mapping::map_in(room, memory.clone(), one.access()).unwrap_err(), DIFFERENT);
    one.assert_no_call();
    other.assert_no_call();
    assert!(range.take(0, R).is_ok(), "the room is free again");
    drop((range, memory));
    one.assert_clean();
    other.assert_clean();
}

#[test]
fn a_room_fits_its_memory_exactly() {
    let bench = Bench::small();
    let (range, memory) = (bench.addresses(1), bench.memory(2));
    bench.simulator.clear_calls();
    for units in [1, 3] {
        let room = range.take(G, units * G).unwrap();
        let error = Mapping::map_in(room, memory.clone(), bench.access()).unwrap_err();
        assert_eq!(error, Error::OutOfBounds { offset: 0, size: 2 * G, reserved: units * G });
    }
    bench.assert_no_call();
    Mapping::map_in(range.take(G, 2 * G).unwrap(), memory, bench.access()).unwrap().close().unwrap();
    drop(range);
    bench.assert_clean();
}

#[test]
fn a_failed_map_or_grant_leaves_room_and_memory_as_they_were() {
    for code in CODES {
        for call in [Call::cuMemMap, Call::cuMemSetAccess] {
            let bench = Bench::small();
            let (range, memory) = (bench.addresses(1), bench.memory(1));
            let before = bench.simulator.live();
            bench.faults.fail(call, 1, code, When::Before);
            let error = Mapping::map(&range, 0, memory.clone(), bench.access()).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(call), Some(code)));
            assert_eq!(bench.simulator.live(), before);
            assert_eq!(bench.count(Call::cuMemUnmap), usize::from(call == Call::cuMemSetAccess));
            let again = Mapping::map(&range, 0, memory.clone(), bench.access()).unwrap();
            drop((range, memory, again));
            bench.assert_clean();
        }
    }
}

/// One is known at once. Of several each is tried alone, on a mapping that goes right after.
#[test]
fn a_failed_grant_tells_who_can_not_have_it() {
    for preset in [Preset::Strict, Preset::Measured] {
        // Three devices, of which the last is nobody's peer.
        let bench = Bench::new(Machine::odd().preset(preset));
        let granularity =
            Granularity::minimum(&bench.driver, &bench.properties(CUmemAllocationHandleType::NONE)).unwrap();
        let size = granularity.round_up(1).unwrap();
        let memory =
            Allocation::create(&bench.driver, size, &bench.properties(CUmemAllocationHandleType::NONE)).unwrap();
        let (memory, range) = (Arc::new(memory), bench.addresses(size.bytes().div_ceil(R)));
        let [own, peer, stranger] = [0, 1, 2].map(CUmemLocation::device);
        let host = CUmemLocation::host();
        for (access, tried, refused) in [
            (&[stranger][..], 1, Some(stranger)),
            (&[host], 1, Some(host)),
            (&[own, stranger], 3, Some(stranger)),
            (&[stranger, own], 2, Some(stranger)),
            (&[own, peer, host, stranger], 4, Some(host)),
        ] {
            let before = bench.simulator.live();
            bench.simulator.clear_calls();
            let access =
                access.iter().map(|&location| CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE });
            let error = Mapping::map(&range, 0, memory.clone(), access.collect()).unwrap_err();
            assert_eq!(error.call(), Some(Call::cuMemSetAccess));
            assert!(matches!(error, Error::Grant { location, .. } if location == refused), "{error}");
            assert_eq!((bench.count(Call::cuMemSetAccess), bench.count(Call::cuMemUnmap)), (tried, 1));
            assert_eq!(bench.simulator.live(), before);
        }
        drop((memory, range));
        bench.assert_clean();
    }
}

/// The error is that of the grant that was wanted, whatever trying each alone answers.
#[test]
fn who_can_not_have_it_is_none_where_each_can_alone() {
    for bench in Bench::presets() {
        let (range, memory) = (bench.addresses(1), bench.memory(1));
        let access: Arc<[_]> = bench.access().iter().chain(&*bench.access()).copied().collect();
        bench.faults.fail(Call::cuMemSetAccess, 1, CUresult::NOT_PERMITTED, When::Before);
        let error = Mapping::map(&range, 0, memory.clone(), access.clone()).unwrap_err();
        assert!(matches!(error, Error::Grant { location: None, .. }) && error.code() == Some(CUresult::NOT_PERMITTED));

        bench.faults.fail(Call::cuMemSetAccess, 1, CUresult::NOT_PERMITTED, When::Before);
        bench.faults.fail(Call::cuMemSetAccess, 2, CUresult::UNKNOWN, When::Before);
        let error = Mapping::map(&range, 0, memory, access.clone()).unwrap_err();
        let Error::Grant { location, .. } = error else { unreachable!("{error}") };
        assert_eq!((location, error.code()), (Some(access[0].location), Some(CUresult::NOT_PERMITTED)));
        drop(range);
        bench.assert_clean();
    }
}

#[test]
fn the_failure_of_the_grant_is_told_though_taking_the_mapping_away_fails_too() {
    let bench = Bench::small();
    let (range, memory) = (bench.addresses(1), bench.memory(1));
    bench.faults.fail(Call::cuMemSetAccess, 1, CUresult::NOT_PERMITTED, When::Before);
    bench.faults.fail(Call::cuMemUnmap, 1, CUresult::UNKNOWN, When::Before);
    let error = Mapping::map(&range, 0, memory.clone(), bench.access()).unwrap_err();
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemSetAccess), Some(CUresult::NOT_PERMITTED)));
    assert_eq!(bench.stranded(), [0, 0, 1, 0]);
    let taken = Mapping::map(&range, 0, memory, bench.access()).unwrap_err();
    assert_eq!(taken, Error::AlreadyMapped { offset: 0, size: G });
}

#[test]
fn after_a_failed_unmap_the_room_stays_taken_and_the_addresses_are_never_freed() {
    for code in CODES {
        for close in [true, false] {
            let bench = Bench::small();
            let (range, memory) = (bench.addresses(1), bench.memory(1));
            let mapping = Mapping::map(&range, G, memory.clone(), bench.access()).unwrap();
            bench.faults.fail(Call::cuMemUnmap, 1, code, When::Before);
            if close {
                let error = mapping.close().unwrap_err();
                assert_eq!((error.call(), error.code()), (Some(Call::cuMemUnmap), Some(code)));
            } else {
                drop(mapping);
            }
            assert_eq!(range.take(0, R).unwrap_err(), Error::AlreadyMapped { offset: 0, size: R });
            let elsewhere = Mapping::map(&range, 2 * G, memory, bench.access()).unwrap();
            elsewhere.close().unwrap();
            drop(range);
            let live = bench.simulator.live();
            assert_eq!((live.reservations, live.mappings, live.allocations), (1, 1, 0));
            assert_eq!(bench.stranded(), [0, 0, 1, 0]);
            // One unmap of the other mapping, none again of the first, and no free.
            assert_eq!((bench.count(Call::cuMemUnmap), bench.count(Call::cuMemAddressFree)), (1, 0));
            assert_eq!(bench.simulator.violations(), []);
        }
    }
}

/// Each call that ends a mapping fails, alone and together: a close goes on, the first failure is told, and exactly
/// what the failed calls would have undone is stranded.
#[test]
fn a_close_goes_on_past_failures_and_tells_the_first() {
    const CALLS: [Call; 3] = [Call::cuMemUnmap, Call::cuMemRelease, Call::cuMemAddressFree];
    for failing in 1..8_usize {
        for close in [true, false] {
            let bench = Bench::small();
            let mapping = bench.mapping();
            let fails = |index: usize| failing & (1 << index) != 0;
            for (index, call) in CALLS.into_iter().enumerate().filter(|(index, _)| fails(*index)) {
                bench.faults.fail(call, 1, CODES[index], When::Before);
            }
            let first = (0..3).find(|index| fails(*index)).unwrap();
            if close {
                let error = mapping.close().unwrap_err();
                assert_eq!((error.call(), error.code()), (Some(CALLS[first]), Some(CODES[first])));
            } else {
                drop(mapping);
            }
            let [unmap, release, free] = [fails(0), fails(1), fails(2)];
            let freed_too = free && !unmap;
            assert_eq!(bench.stranded(), [usize::from(freed_too), usize::from(release), usize::from(unmap), 0]);
            let live = bench.simulator.live();
            let expect = (usize::from(unmap || free), usize::from(release), usize::from(unmap));
            assert_eq!((live.reservations, live.allocations, live.mappings), expect);
            assert_eq!(bench.simulator.violations(), []);
        }
    }
}

#[test]
fn after_the_driver_has_shut_down_letting_go_is_quiet() {
    let bench = Bench::small();
    let [closed, dropped] = [bench.mapping(), bench.mapping()];
    bench.simulator.shut_down();
    assert_eq!(closed.close().unwrap_err().code(), Some(CUresult::DEINITIALIZED));
    drop(dropped);
    assert_eq!(bench.stranded(), [0; 4]);
}

#[test]
fn whichever_of_many_threads_lets_go_last_frees_once() {
    for close in [true, false] {
        let bench = Bench::small();
        for _ in 0..20 {
            let (range, memory) = (bench.addresses(1), bench.memory(1));
            let map = |at| Mapping::map(&range, at * G, memory.clone(), bench.access()).unwrap();
            let mappings: Vec<_> = (0..8).map(map).collect();
            drop((range, memory));
            let start = std::sync::Barrier::new(mappings.len());
            std::thread::scope(|scope| {
                for mapping in mappings {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        if close { mapping.close().unwrap() } else { drop(mapping) }
                    });
                }
            });
        }
        let count = |call| bench.count(call);
        assert_eq!((count(Call::cuMemUnmap), count(Call::cuMemRelease), count(Call::cuMemAddressFree)), (160, 20, 20));
        bench.assert_clean();
    }
}

/// It pins the memory after everything else let go of it.
#[test]
fn a_dma_buf_outlives_its_mapping() {
    for bench in Bench::presets() {
        let mapping = Mapping::map(&bench.addresses(1), 0, bench.memory(1), bench.access()).unwrap();
        let (one, other) = (mapping.export_dma_buf().unwrap(), mapping.export_dma_buf().unwrap());
        assert_eq!(bench.simulator.live().contexts, 0, "the context that it takes is given back");
        assert!(bench.driver.ctx_get_current().unwrap().is_null());
        mapping.close().unwrap();
        assert_eq!(bench.simulator.live().mappings, 0);
        drop((one, other));
        bench.assert_clean();
    }
}

#[test]
fn a_driver_without_dma_bufs_is_told_apart_and_the_mapping_stays() {
    let bench = Bench::new(Machine::small().driver_version(11060));
    let mapping = Mapping::map(&bench.addresses(1), 0, bench.memory(1), bench.access()).unwrap();
    let unsupported = mapping.export_dma_buf().unwrap_err();
    assert_eq!(unsupported.call(), Some(Call::cuMemGetHandleForAddressRange));
    assert!(matches!(unsupported, Error::Driver(cuvmm_driver::Error::Unsupported { .. })), "{unsupported}");
    assert!(bench.simulator.is_mapped(mapping.address()));
    mapping.close().unwrap();
    bench.assert_clean();
}
