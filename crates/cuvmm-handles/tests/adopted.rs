//! Ranges and mappings that were made elsewhere: taken over as they are, and given back as ours. And whether there is
//! one at an address.
//!
//! # Safety
//! What is taken over was made by the test, through the driver's own calls, and given away.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::sync::{Arc, Mutex};

use cuvmm_driver::sys::{CUdeviceptr, CUmemAllocationHandleType, CUresult};
use cuvmm_driver::{Call, Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_handles::{Allocation, Error, Granularity, Mapping, Reservation, Usage, is_vmm};
use cuvmm_sim::{Faults, Live, Machine, Preset, Simulator, When};
use support::{Bench, CODES, G, R};

const DIFFERENT: Error = Error::Driver(cuvmm_driver::Error::DifferentDrivers);
/// The sizes of the mappings of [`foreign`], one behind the other.
const UNITS: [usize; 3] = [2, 1, 4];

/// A range of another library's, with a mapping of its own memory for each of [`UNITS`], whose handles it released.
fn foreign(bench: &Bench) -> CUdeviceptr {
    let driver = &bench.driver;
    let address = driver.mem_address_reserve(R, 0, CUdeviceptr(0)).unwrap();
    let mut at = address;
    for bytes in UNITS.map(|units| units * G) {
        let handle = driver.mem_create(bytes, &bench.properties(CUmemAllocationHandleType::NONE)).unwrap();
        // SAFETY: both were made just now, and nothing else is mapped there.
        unsafe { driver.mem_map(at, bytes, handle) }.unwrap();
        // SAFETY: it is given back once.
        unsafe { driver.mem_release(handle) }.unwrap();
        // SAFETY: it is the mapping of just now.
        unsafe { driver.mem_set_access(at, bytes, &bench.access()) }.unwrap();
        at = at.checked_add(bytes).unwrap();
    }
    address
}

fn adopt_range(bench: &Bench, address: CUdeviceptr) -> Arc<Reservation> {
    let size = Reservation::GRANULARITY.exact(R).unwrap();
    // SAFETY: the range is that of `foreign`, given away once.
    Arc::new(unsafe { Reservation::from_raw(&bench.driver, address, size) }.unwrap())
}

fn retain(bench: &Bench, address: CUdeviceptr, units: usize) -> Arc<Allocation> {
    let size = Granularity::new(G).unwrap().exact(units * G).unwrap();
    // SAFETY: the mapping is the test's, and so long.
    Arc::new(unsafe { Allocation::retain(&bench.driver, address, size) }.unwrap())
}

fn adopt(bench: &Bench) -> (Arc<Reservation>, Vec<Mapping>) {
    let range = adopt_range(bench, foreign(bench));
    let mut at = 0;
    let mappings = UNITS.map(|units| {
        let room = range.take(at * G, units * G).unwrap();
        at += units;
        let memory = retain(bench, room.address(), units);
        // SAFETY: the mapping is that of `foreign`, with that access, given away once.
        unsafe { Mapping::from_raw(room, memory, bench.access()) }.unwrap()
    });
    (range, mappings.into())
}

/// Notes what undoes, with its address and size.
#[derive(Clone, Default)]
struct Undone(Arc<Mutex<Vec<(Call, u64, u64)>>>);

impl Hook for Undone {
    fn after(&self, invocation: &Invocation<'_>, _: CUresult) -> Option<Failure> {
        if let (call @ (Call::cuMemUnmap | Call::cuMemAddressFree), [address, size]) =
            (invocation.call, invocation.arguments)
        {
            self.0.lock().unwrap().push((call, *address, *size));
        }
        None
    }
}

#[test]
fn an_adopted_range_is_given_back_once_mapping_by_mapping_and_by_its_own_pair() {
    for (close, preset) in [(true, Preset::Strict), (false, Preset::Strict), (true, Preset::Measured)] {
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let (simulator, undone) = (Simulator::new(Machine::small().preset(preset)), Undone::default());
            let driver = Driver::new(Hooked::new(simulator.clone(), undone.clone())).unwrap();
            let bench = Bench { simulator, driver, faults: Faults::new() };
            let (range, mappings) = adopt(&bench);
            let start = range.address().0;
            let pair = (Call::cuMemAddressFree, start, R as u64);
            drop(range);
            let places = mappings.iter().map(|mapping| (Call::cuMemUnmap, mapping.address().0, mapping.size() as u64));
            let places: Vec<_> = places.collect();
            let mut mappings: Vec<_> = mappings.into_iter().map(Some).collect();
            for index in order {
                assert_eq!(bench.simulator.live().reservations, 1);
                let mapping = mappings[index].take().unwrap();
                if close { mapping.close().unwrap() } else { drop(mapping) }
            }
            let expect: Vec<_> = order.map(|index| places[index]).into_iter().chain([pair]).collect();
            assert_eq!(*undone.0.lock().unwrap(), expect);
            bench.assert_clean();
        }
    }
}

#[test]
fn taking_over_makes_no_call_and_is_counted_as_ours() {
    for bench in Bench::presets() {
        let usage = Arc::<Usage>::default();
        let address = foreign(&bench);
        let memory = retain(&bench, address, UNITS[0]);
        bench.simulator.clear_calls();
        let range = Arc::new(Arc::into_inner(adopt_range(&bench, address)).unwrap().counted(&usage));
        let room = range.take(0, UNITS[0] * G).unwrap();
        // SAFETY: the mapping is that of `foreign`, with that access, given away once.
        let mapping = unsafe { Mapping::from_raw(room, memory.clone(), bench.access()) }.unwrap();
        bench.assert_no_call();
        assert_eq!((mapping.address(), mapping.size(), mapping.access()), (address, UNITS[0] * G, &bench.access()));
        assert!(Arc::ptr_eq(mapping.allocation(), &memory));
        assert_eq!((usage.reserved().now, usage.mapped().now), (R, UNITS[0] * G));
        // It is a mapping like any other: its memory is mapped again with its access, and outlives it.
        let alias = Mapping::map(&bench.addresses(1), 0, memory, mapping.access().clone()).unwrap();
        mapping.close().unwrap();
        assert_eq!((usage.mapped().now, bench.simulator.is_mapped(address)), (0, false));
        alias.close().unwrap();
        assert_eq!(bench.simulator.live().mappings, UNITS.len() - 1, "what was not taken over stays");
        for (at, units) in [(2, UNITS[1]), (3, UNITS[2])] {
            // SAFETY: these are the other mappings of `foreign`.
            unsafe { bench.driver.mem_unmap(address.checked_add(at * G).unwrap(), units * G) }.unwrap();
        }
        Arc::into_inner(range).unwrap().close().unwrap();
        assert_eq!(usage.reserved().now, 0);
        bench.assert_clean();
    }
}

#[test]
fn a_size_that_no_reservation_has_is_not_taken_over() {
    let bench = Bench::small();
    let fine = Granularity::new(G).unwrap();
    for bytes in [0, G, R + G] {
        // SAFETY: it is refused.
        let refused = unsafe { Reservation::from_raw(&bench.driver, CUdeviceptr(1), fine.exact(bytes).unwrap()) };
        assert_eq!(refused.unwrap_err(), Error::NotGranular { bytes, granularity: R });
    }
    bench.assert_no_call();
}

#[test]
fn what_can_not_be_the_mapping_in_a_room_is_not_taken_over() {
    let [bench, other] = [Bench::small(), Bench::small()];
    let (range, memory, stranger) = (bench.addresses(1), bench.memory(2), other.memory(2));
    let coarse = Granularity::new(2 * G).unwrap().exact(2 * G).unwrap();
    let coarse = Allocation::create(&bench.driver, coarse, &bench.properties(CUmemAllocationHandleType::NONE)).unwrap();
    let coarse = Arc::new(coarse);
    bench.simulator.clear_calls();
    other.simulator.clear_calls();
    let long = |units: usize| Error::OutOfBounds { offset: 0, size: 2 * G, reserved: units * G };
    let misplaced = Error::NotGranular { bytes: G, granularity: 2 * G };
    for (at, units, memory, expect) in
        [(0, 2, &stranger, DIFFERENT), (0, 1, &memory, long(1)), (0, 3, &memory, long(3)), (1, 2, &coarse, misplaced)]
    {
        let room = range.take(at * G, units * G).unwrap();
        // SAFETY: it is refused.
        assert_eq!(unsafe { Mapping::from_raw(room, memory.clone(), Arc::new([])) }.unwrap_err(), expect);
        assert!(range.take(0, R).is_ok(), "the room is free again");
    }
    bench.assert_no_call();
    other.assert_no_call();
    drop((range, memory, coarse, stranger));
    bench.assert_clean();
    other.assert_clean();
}

/// Each call that gives an adopted range back fails: what it would have undone, and what needed it, is stranded.
#[test]
fn a_failure_to_give_back_strands_that_and_what_needed_it() {
    const CALLS: [Call; 3] = [Call::cuMemUnmap, Call::cuMemRelease, Call::cuMemAddressFree];
    for (index, call) in CALLS.into_iter().enumerate() {
        for code in CODES {
            for bench in Bench::presets() {
                let (range, mappings) = adopt(&bench);
                drop(range);
                bench.faults.fail(call, 1, code, When::Before);
                let results: Vec<_> = mappings.into_iter().map(Mapping::close).collect();
                let errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
                assert_eq!(
                    errors.iter().map(|error| (error.call(), error.code())).collect::<Vec<_>>(),
                    [(Some(call), Some(code))]
                );
                let live = bench.simulator.live();
                let expect = [(1, 1, 0), (0, 0, 1), (1, 0, 0)][index];
                assert_eq!((live.reservations, live.mappings, live.allocations), expect);
                assert_eq!(bench.stranded(), [[0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]][index]);
                assert_eq!(bench.simulator.violations(), []);
            }
        }
    }
}

#[test]
fn only_mapped_memory_of_the_virtual_memory_calls_is_vmm() {
    for bench in Bench::presets() {
        let asked = |address: u64| is_vmm(&bench.driver, CUdeviceptr(address)).unwrap();
        let reserved = bench.addresses(1);
        let mapping = Mapping::map(&bench.addresses(1), G, bench.memory(2), Arc::new([])).unwrap();
        let device = bench.driver.device(0).unwrap();
        let context = device.primary_ctx_retain().unwrap();
        // SAFETY: it is alive until it is released below.
        unsafe { bench.driver.ctx_push_current(context) }.unwrap();
        let plain = bench.driver.mem_alloc(G).unwrap();
        let before = bench.simulator.live();

        let (start, end) = (mapping.address().0, mapping.address().0 + 2 * G as u64);
        for address in [start, start + 1, start + G as u64, end - 1] {
            assert!(asked(address), "mapped, though nobody has access: {address:#x}");
        }
        for address in [start - 1, end, reserved.address().0, plain.0, 0, 1 << 20, u64::MAX] {
            assert!(!asked(address), "{address:#x}");
        }
        assert_eq!(bench.simulator.live(), before);

        // SAFETY: it was made above, and nothing uses it.
        unsafe { bench.driver.mem_free(plain) }.unwrap();
        // SAFETY: it was pushed above.
        unsafe { bench.driver.ctx_pop_current() }.unwrap();
        // SAFETY: it was retained above.
        unsafe { device.primary_ctx_release() }.unwrap();
        mapping.close().unwrap();
        assert!(!asked(start) && !asked(plain.0));
        drop(reserved);
        bench.assert_clean();
    }
}

#[test]
fn an_answer_other_than_yes_or_no_is_an_error() {
    for code in CODES {
        for bench in Bench::presets() {
            let mapping = bench.mapping();
            bench.faults.fail(Call::cuMemRetainAllocationHandle, 1, code, When::Before);
            match is_vmm(&bench.driver, mapping.address()) {
                Ok(found) => assert!(!found && code == CUresult::INVALID_VALUE),
                Err(error) => assert_eq!(
                    (error.call(), error.code()),
                    (
                        Some(Call::cuMemRetainAllocationHandle),
                        Some(code).filter(|code| *code != CUresult::INVALID_VALUE)
                    )
                ),
            }
            bench.faults.fail(Call::cuMemRelease, 1, code, When::Before);
            let error = is_vmm(&bench.driver, mapping.address()).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(Call::cuMemRelease), Some(code)));
            assert_eq!((bench.simulator.live().allocations, bench.stranded()), (2, [0, 1, 0, 0]));
        }
    }
    let old = Bench::new(Machine::small().driver_version(10020));
    let error = is_vmm(&old.driver, CUdeviceptr(0)).unwrap_err();
    assert!(matches!(error, Error::Driver(cuvmm_driver::Error::Unsupported { .. })), "{error}");
    assert_eq!(old.simulator.live(), Live::default());
}
