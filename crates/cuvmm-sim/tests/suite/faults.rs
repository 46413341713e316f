//! Failures on demand, and the ledger.

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, Call, Driver, Hooked};
use cuvmm_sim::faults::Both;
use cuvmm_sim::{Faults, Ledger, Live, Machine, Simulator, When};

use crate::common::{Gpu, UNIT};

const OUT_OF_MEMORY: CUresult = CUresult::OUT_OF_MEMORY;

/// A simulator behind faults, with a ledger next to it.
fn hooked() -> (Gpu, Faults, Ledger) {
    let (faults, ledger) = (Faults::new(), Ledger::new());
    let simulator = Simulator::new(Machine::h200());
    let hook = Both { outer: faults.clone(), inner: ledger.clone() };
    let driver = Driver::new(Hooked::new(simulator.clone(), hook)).unwrap();
    (Gpu { simulator, driver }, faults, ledger)
}

#[test]
fn the_nth_call_from_now_fails_and_no_other() {
    for nth in 1..=4 {
        let (gpu, faults, _) = hooked();
        gpu.create(UNIT).unwrap();
        faults.fail(Call::cuMemCreate, nth, OUT_OF_MEMORY, When::Before);
        for number in 1..=5 {
            assert_eq!(gpu.create(UNIT).err(), (number == nth).then_some(2), "{number} of {nth}");
            gpu.reserve(UNIT, 0, 0).unwrap();
        }
        assert_eq!(faults.fired(), 1);
    }
}

#[test]
fn a_failure_before_the_effect_leaves_none_and_one_after_it_leaves_it() {
    for (when, left) in [(When::Before, 0), (When::After, 1)] {
        let (gpu, faults, ledger) = hooked();
        for call in [Call::cuMemCreate, Call::cuMemAddressReserve] {
            faults.fail(call, 1, CUresult::UNKNOWN, when);
        }
        assert_eq!(gpu.create(UNIT), Err(999));
        assert_eq!(gpu.reserve(UNIT, 0, 0), Err(999));
        let (live, told) = (gpu.simulator.live(), ledger.live());
        assert_eq!((live.allocations, live.reservations), (left, left));
        assert_eq!((told.allocations, told.reservations), (left, left), "next to the driver, the ledger sees it too");
        assert_eq!(ledger.count(Call::cuMemCreate), left);
    }
}

#[test]
fn a_ledger_before_the_faults_counts_what_the_caller_was_told() {
    let (faults, ledger) = (Faults::new(), Ledger::new());
    let hook = Both { outer: ledger.clone(), inner: faults.clone() };
    let simulator = Simulator::new(Machine::h200());
    let driver = Driver::new(Hooked::new(simulator.clone(), hook)).unwrap();
    let gpu = Gpu { simulator, driver };
    faults.fail(Call::cuMemCreate, 1, OUT_OF_MEMORY, When::After);
    faults.fail(Call::cuMemCreate, 1, OUT_OF_MEMORY, When::Before);
    assert_eq!(gpu.create(UNIT), Err(2), "refused before");
    assert_eq!(gpu.create(UNIT), Err(2), "and after");
    assert_eq!(gpu.simulator.live().allocations, 1);
    assert_eq!(ledger.live(), Live::default());
    assert_eq!(ledger.count(Call::cuMemCreate), 2);
}

#[test]
fn failures_can_depend_on_the_arguments() {
    let (gpu, faults, _) = hooked();
    let hinted = |arguments: &[u64]| arguments.get(3).is_some_and(|&hint| hint != 0);
    faults.fail_when(Call::cuMemAddressReserve, hinted, CUresult::NOT_SUPPORTED, When::Before);
    let address = gpu.reserve(UNIT, 0, 0).unwrap();
    for _ in 0..3 {
        assert_eq!(gpu.reserve(UNIT, 0, address + UNIT as u64), Err(801));
    }
    assert_eq!(faults.fired(), 3);
    faults.clear();
    assert!(gpu.reserve(UNIT, 0, address + UNIT as u64).is_ok());
    assert_eq!(faults.fired(), 3, "what fired stays counted");
}

#[test]
fn a_success_cannot_be_planned_and_a_failure_keeps_its_own_code() {
    let (gpu, faults, _) = hooked();
    faults.fail(Call::cuMemCreate, 1, CUresult::SUCCESS, When::Before);
    assert_eq!(gpu.create(1), Err(1));
    faults.fail(Call::cuMemCreate, 1, OUT_OF_MEMORY, When::After);
    assert_eq!(gpu.create(1), Err(1));
    assert_eq!(faults.fired(), 0);
}

#[test]
fn the_ledger_agrees_with_the_simulator() {
    let (gpu, _, ledger) = hooked();
    let gpu = gpu.with_context();
    let agree = || {
        let live = gpu.simulator.live();
        let told = ledger.live();
        let of = |live: &Live| {
            [live.reservations, live.allocations, live.mappings, live.streams, live.events, live.contexts]
        };
        assert_eq!(of(&live), of(&told));
        live
    };
    let buffer = gpu.buffer_of(gpu.create_exportable(UNIT), UNIT);
    let stream = gpu.stream(CUstream_flags::NON_BLOCKING);
    let event = gpu.event();
    assert_eq!(gpu.retain(buffer.address), Ok(buffer.handle));
    let imported = gpu.import(&gpu.export(buffer.handle).unwrap()).unwrap();
    let range = gpu.reserve(2 * UNIT, 0, 0).unwrap();
    for offset in [0, UNIT as u64] {
        assert_eq!(gpu.map(range + offset, UNIT, imported), 0);
    }
    assert_eq!(gpu.unmap(range, UNIT / 2), 1, "a failure is not counted");
    assert_eq!(agree().mappings, 3);
    assert_eq!(gpu.unmap(range, 2 * UNIT), 0);
    assert_eq!(agree().mappings, 1);
    assert_eq!([gpu.release(imported), gpu.release(buffer.handle), gpu.free(range, 2 * UNIT)], [0; 3]);
    gpu.close(buffer);
    assert_eq!([gpu.destroy(stream), gpu.event_destroy(event)], [0, 0]);
    // SAFETY: numbers alone.
    assert_eq!(unsafe { gpu.raw().cuDevicePrimaryCtxRelease(CUdevice(0)) }.0, 0);
    assert!(agree().is_empty());
    assert!(ledger.live().is_empty());
    assert_eq!(ledger.count(Call::cuMemUnmap), 3);
}

#[test]
fn any_call_can_fail_by_its_number() {
    for nth in 1..=4 {
        let (gpu, faults, _) = hooked();
        faults.fail_any(nth, OUT_OF_MEMORY, When::Before);
        let address = gpu.reserve(UNIT, 0, 0);
        let handle = gpu.create(UNIT);
        let codes = [
            address.err(),
            handle.err(),
            Some(gpu.map(address.unwrap_or(0), UNIT, handle.unwrap_or(0))).filter(|&code| code != 0),
            gpu.access(CUmemLocation::device(0), address.unwrap_or(0)).err(),
        ];
        assert_eq!(codes[nth - 1], Some(2), "{nth}");
        assert_eq!(codes.iter().filter(|code| **code == Some(2)).count(), 1);
        assert_eq!(faults.fired(), 1);
    }
}

#[test]
fn a_predicate_may_plan_and_ask() {
    let (gpu, faults, _) = hooked();
    let own = faults.clone();
    let plans = move |_: &[u64]| {
        own.fail(Call::cuMemCreate, 1, OUT_OF_MEMORY, When::Before);
        own.fired() == 0
    };
    faults.fail_when(Call::cuMemAddressReserve, plans, CUresult::UNKNOWN, When::Before);
    assert_eq!(gpu.reserve(UNIT, 0, 0), Err(999));
    assert_eq!(gpu.create(UNIT), Err(2));
    assert!(gpu.reserve(UNIT, 0, 0).is_ok());
}
