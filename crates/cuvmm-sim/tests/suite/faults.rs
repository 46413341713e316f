//! Failures on demand, and the ledger.

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, Call, Driver, Hooked};
use cuvmm_sim::faults::{Both, Random};
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

#[test]
fn the_log_has_arguments_results_and_threads() {
    let (gpu, faults, ledger) = hooked();
    ledger.clear_calls();
    let address = gpu.reserve(UNIT, 0, 0).unwrap();
    let handle = gpu.create(UNIT).unwrap();
    assert_eq!(gpu.map_with(address, UNIT, UNIT, handle, 0), 801);
    faults.fail(Call::cuMemMap, 1, OUT_OF_MEMORY, When::Before);
    assert_eq!(gpu.map(address, UNIT, handle), 2);
    faults.fail(Call::cuMemMap, 1, OUT_OF_MEMORY, When::After);
    assert_eq!(gpu.map(address, UNIT, handle), 2);
    std::thread::scope(|scope| scope.spawn(|| assert_eq!(gpu.unmap(address, UNIT), 0)).join().unwrap());

    let log = ledger.log();
    let told: Vec<String> = log.iter().map(ToString::to_string).collect();
    assert!(told[0].ends_with(&format!(", {UNIT}, 0, 0x0, 0) = 0")), "{}", told[0]);
    let expected = [
        format!("cuMemMap({address:#x}, {UNIT}, {UNIT}, {handle:#x}, 0) = 801"),
        format!("cuMemMap({address:#x}, {UNIT}, 0, {handle:#x}, 0) = 0"),
        format!("cuMemUnmap({address:#x}, {UNIT}) = 0"),
    ];
    assert_eq!(told[2..], expected, "the driver's own answers, and not the call that it never saw");
    let here = std::thread::current().id();
    let elsewhere: Vec<bool> = log.iter().map(|made| made.thread != here).collect();
    assert_eq!(elsewhere, [false, false, false, false, true]);
    assert_eq!(ledger.total(), 5);
    assert_eq!(ledger.log_since(4), log[4..]);
    assert_eq!(ledger.log_since(6), []);
}

#[test]
fn the_log_keeps_the_last_calls_alone() {
    let (gpu, _, ledger) = hooked();
    ledger.clear_calls();
    const KEPT: usize = 1 << 18;
    for size in 1..=KEPT + 3 {
        assert_eq!(gpu.unmap(0, size), 1);
    }
    let log = ledger.log();
    assert_eq!((log.len(), ledger.calls().len(), ledger.total()), (KEPT, KEPT, KEPT + 3));
    assert_eq!(ledger.count(Call::cuMemUnmap), KEPT + 3);
    assert_eq!((log[0].arguments[1], log[KEPT - 1].arguments[1]), (4, KEPT as u64 + 3));
    let since = ledger.log_since(KEPT);
    assert_eq!((since.len(), since[0].arguments[1]), (3, KEPT as u64 + 1));
}

#[test]
fn the_driver_keeps_its_last_calls_and_violations_alone() {
    const KEPT: usize = 1 << 18;
    let gpu = Gpu::strict();
    for handle in 1..=KEPT as u64 + 3 {
        assert_eq!(gpu.release(handle), 1);
    }
    let violations = gpu.simulator.violations();
    assert_eq!((violations.len(), gpu.simulator.calls().len()), (KEPT, KEPT));
    assert_eq!(violations[0].to_string(), "cuMemRelease: handle 0x4 is not alive");
}

#[test]
fn a_plan_forgets_what_fired_or_never_can() {
    let (gpu, faults, _) = hooked();
    for nth in [0, 1, 2] {
        faults.fail(Call::cuMemCreate, nth, OUT_OF_MEMORY, When::Before);
        faults.fail_any(nth, OUT_OF_MEMORY, When::After);
    }
    assert!(format!("{faults:?}").contains("rules: 4"), "{faults:?}");
    assert_eq!([gpu.create(UNIT), gpu.create(UNIT)], [Err(2), Err(2)]);
    let _ = [gpu.reserve(UNIT, 0, 0), gpu.reserve(UNIT, 0, 0)];
    assert_eq!(faults.fired(), 4);
    assert!(format!("{faults:?}").contains("rules: 0"), "{faults:?}");
}

#[test]
fn failures_at_random_follow_from_the_seed_and_are_told() {
    let run = |seed: u64| {
        let (gpu, faults, ledger) = hooked();
        let calls = [Call::cuMemCreate, Call::cuMemRelease];
        faults.fail_at_random(Random::new(seed).per_thousand(200).calls(calls).codes([OUT_OF_MEMORY, CUresult(1)]));
        ledger.clear_calls();
        let mut told = Vec::new();
        for _ in 0..1000 {
            gpu.reserve(UNIT, 0, 0).unwrap();
            match gpu.create(UNIT) {
                Ok(handle) => told.extend(Some(gpu.release(handle)).filter(|&code| code != 0)),
                Err(code) => told.push(code),
            }
        }
        assert!(format!("{faults:?}").contains(&format!("seed: {seed}")));
        let seen = faults.faults();
        assert_eq!(seen.iter().map(|fault| fault.code.0).collect::<Vec<_>>(), told);
        assert_eq!(faults.fired(), told.len());
        // A call that failed before its effect never reached the driver.
        let lost = seen.iter().filter(|fault| fault.call == Call::cuMemCreate && fault.when == When::Before).count();
        assert_eq!(ledger.count(Call::cuMemCreate), 1000 - lost);
        seen
    };
    let seen = run(7);
    assert_eq!(seen, run(7));
    assert_ne!(seen, run(8));
    // About a fifth of 1000 creates and 800 releases, of all kinds.
    assert!((250..470).contains(&seen.len()), "{}", seen.len());
    for call in [Call::cuMemCreate, Call::cuMemRelease] {
        for when in [When::Before, When::After] {
            for code in [OUT_OF_MEMORY, CUresult(1)] {
                let count =
                    seen.iter().filter(|fault| (fault.call, fault.when, fault.code) == (call, when, code)).count();
                assert!(count > 10, "{call} {when:?} {code}: {count}");
            }
        }
    }
}

#[test]
fn failures_at_random_are_of_one_kind_where_that_is_asked_for() {
    for (when, kept) in [(When::Before, false), (When::After, true)] {
        let (gpu, faults, ledger) = hooked();
        faults.fail_at_random(Random::new(3).per_thousand(200).calls([Call::cuMemAddressReserve]).when(when));
        let failed = (0..1000).filter(|_| gpu.reserve(UNIT, 0, 0).is_err()).count();
        assert!((130..270).contains(&failed), "{failed}");
        let seen = faults.faults();
        assert_eq!(seen.iter().filter(|fault| fault.when == when).count(), failed);
        assert_eq!(ledger.live().reservations, if kept { 1000 } else { 1000 - failed });
    }
}

#[test]
fn nothing_fails_at_random_that_was_not_meant_to() {
    let (gpu, faults, _) = hooked();
    faults.fail_at_random(Random::new(1).per_thousand(1000).calls([Call::cuMemMap]));
    faults.fail_at_random(Random::new(1).per_thousand(1000).codes([CUresult::SUCCESS]));
    faults.fail_at_random(Random::new(1).per_thousand(0));
    let (address, handle) = (gpu.reserve(UNIT, 0, 0).unwrap(), gpu.create(UNIT).unwrap());
    for _ in 0..20 {
        assert_eq!(gpu.map(address, UNIT, handle), 999, "each time");
        gpu.unmap(address, UNIT);
    }
    faults.clear();
    assert_eq!(gpu.map(address, UNIT, handle), 0);
    assert_eq!(faults.fired(), 20);
    let told: Vec<String> = faults.faults().iter().map(ToString::to_string).collect();
    for when in ["before", "after"] {
        assert!(told.contains(&format!("cuMemMap failed with CUDA_ERROR_UNKNOWN (999) {when} its effect")), "{told:?}");
    }
}
