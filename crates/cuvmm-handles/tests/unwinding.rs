//! Panics in a driver's calls: what may still be mapped keeps its room and its addresses for ever, and all else is given
//! back while the thread unwinds.
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};

use cuvmm_driver::{Call, Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_handles::{Error, Mapping};
use cuvmm_sim::{Faults, Machine, Simulator};
use support::{Bench, G, R};

const SURPRISE: &str = "a surprise";

/// Panics at the next call of that name, once.
#[derive(Clone, Default)]
struct Panics(Arc<Mutex<Option<Call>>>);

impl Panics {
    fn at(&self, call: Call) {
        *self.0.lock().unwrap() = Some(call);
    }
}

impl Hook for Panics {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        let due = self.0.lock().unwrap().take_if(|call| *call == invocation.call);
        if due.is_some() {
            resume_unwind(Box::new(SURPRISE));
        }
        None
    }
}

fn bench() -> (Bench, Panics) {
    let (simulator, panics) = (Simulator::new(Machine::small()), Panics::default());
    let driver = Driver::new(Hooked::new(simulator.clone(), panics.clone())).unwrap();
    simulator.clear_calls();
    (Bench { simulator, driver, faults: Faults::new() }, panics)
}

#[track_caller]
fn require_panic(work: impl FnOnce()) {
    let panic = catch_unwind(AssertUnwindSafe(work)).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&SURPRISE));
}

#[test]
fn after_a_panic_in_an_unmap_the_room_stays_taken_and_the_addresses_are_never_freed() {
    for close in [true, false] {
        let (bench, panics) = bench();
        let (range, memory) = (bench.addresses(1), bench.memory(1));
        let mapping = Mapping::map(&range, G, memory.clone(), bench.access()).unwrap();
        panics.at(Call::cuMemUnmap);
        require_panic(|| if close { mapping.close().unwrap() } else { drop(mapping) });
        assert_eq!(range.take(0, R).unwrap_err(), Error::AlreadyMapped { offset: 0, size: R });
        assert_eq!(range.take(G, G).unwrap_err(), Error::AlreadyMapped { offset: G, size: G });
        Mapping::map(&range, 2 * G, memory, bench.access()).unwrap().close().unwrap();
        drop(range);
        let live = bench.simulator.live();
        assert_eq!((live.reservations, live.mappings, live.allocations), (1, 1, 0));
        // One unmap, of the other mapping: none of the first, and no free.
        assert_eq!((bench.count(Call::cuMemUnmap), bench.count(Call::cuMemAddressFree)), (1, 0));
        assert_eq!(bench.simulator.violations(), []);
    }
}

#[test]
fn after_a_panic_in_a_release_the_addresses_are_freed_all_the_same() {
    for close in [true, false] {
        let (bench, panics) = bench();
        let mapping = bench.mapping();
        panics.at(Call::cuMemRelease);
        require_panic(|| if close { mapping.close().unwrap() } else { drop(mapping) });
        let live = bench.simulator.live();
        assert_eq!((live.reservations, live.mappings, live.allocations), (0, 0, 1));
        assert_eq!(bench.simulator.violations(), []);
    }
}

#[test]
fn a_panic_while_mapping_leaves_nothing_mapped() {
    for call in [Call::cuMemMap, Call::cuMemSetAccess] {
        let (bench, panics) = bench();
        let (range, memory) = (bench.addresses(1), bench.memory(1));
        panics.at(call);
        require_panic(|| drop(Mapping::map(&range, 0, memory.clone(), bench.access()).unwrap()));
        assert_eq!(bench.simulator.live().mappings, 0);
        Mapping::map(&range, 0, memory, bench.access()).unwrap().close().unwrap();
        drop(range);
        bench.assert_clean();
    }
}
