//! What is found on simulated machines where something is missing, or where a call fails.

use cuvmm::driver::Hooked;
use cuvmm::{CUresult, Call, Driver};
use cuvmm_sim::faults::Both;
use cuvmm_sim::{Faults, Live, Machine, NumaNode, Simulator, When};

use super::report::{Answer, Culprit, Report, Row, Section};
use super::trace::Trace;
use super::{examine, nodes_of};

/// The calls that give something back, or that put the thread back as it was.
const UNDOING: [Call; 7] = [
    Call::cuMemUnmap,
    Call::cuMemRelease,
    Call::cuMemAddressFree,
    Call::cuStreamDestroy,
    Call::cuDevicePrimaryCtxRelease,
    Call::cuCtxPopCurrent,
    Call::cuThreadExchangeStreamCaptureMode,
];

/// A machine that was examined, and what is left there.
struct Examined {
    simulator: Simulator,
    driver: Driver,
    sections: Vec<Section>,
}

impl Examined {
    fn new(machine: Machine, plan: impl FnOnce(&Faults)) -> Self {
        let (simulator, faults, trace) = (Simulator::new(machine), Faults::new(), Trace::default());
        let hook = Both { outer: trace.clone(), inner: faults.clone() };
        let driver = Driver::new(Hooked::new(simulator.clone(), hook)).unwrap();
        plan(&faults);
        let sections = examine(&driver, &trace, None, &nodes_of(simulator.machine()));
        Self { simulator, driver, sections }
    }

    fn rows(&self) -> impl Iterator<Item = (&str, &Row)> {
        self.sections.iter().flat_map(|section| section.rows.iter().map(|row| (section.id.as_str(), row)))
    }

    #[track_caller]
    fn row(&self, section: &str, id: &str) -> &Row {
        let found = self.rows().find(|(found, row)| *found == section && row.id == id);
        found.unwrap_or_else(|| panic!("no {id} in {section}")).1
    }

    /// Demands a `no` of that call, with that code, and a cure.
    #[track_caller]
    fn require_no(&self, section: &str, id: &str, call: Call, code: CUresult) {
        let row = self.row(section, id);
        assert_eq!(row.answer, Answer::No(Culprit { call: Some(call), code: Some(code) }), "{row:?}");
        assert!(row.cure.is_some(), "{row:?}");
    }

    fn works(&self) -> bool {
        Report { driver: "sim", subject: String::new(), sections: self.sections.clone() }.works()
    }

    #[track_caller]
    fn require_clean(&self) {
        assert_eq!(self.simulator.live(), Live::default());
        assert_eq!(self.simulator.violations(), []);
        assert!(self.driver.stranded().is_empty());
        assert_eq!(self.row("after", "left_behind").answer, Answer::Fact);
    }
}

/// Two devices on which everything works, with memory that is cheap to make, and few enough addresses that tests beside
/// each other do not take them from each other: how often one is asked for them depends on how many there are. The longest
/// reservation leaves some.
fn pair() -> Machine {
    Machine::h200_pair().with_imex().granularity(|_, _| 64 << 10).address_window((1 << 40) + (1 << 30))
}

/// Every call of an examination fails once: that turns the one answer that it was made for.
#[test]
fn a_call_that_fails_is_named_by_the_one_answer_it_turns_and_leaves_nothing() {
    let sound = Examined::new(pair(), |_| ());
    let noes: Vec<&Row> = sound.rows().map(|(_, row)| row).filter(|row| matches!(row.answer, Answer::No(_))).collect();
    assert!(noes.is_empty(), "{noes:?}");
    let mut counts = std::collections::BTreeMap::<Call, usize>::new();
    let made: Vec<(&str, &str, Call)> = sound
        .rows()
        .flat_map(|(section, row)| row.calls.iter().map(move |call| (section, row.id.as_str(), *call)))
        .collect();
    assert!(UNDOING.iter().all(|call| made.iter().any(|(_, _, made)| made == call)), "{made:?}");
    for (section, id, call) in made {
        let nth = counts.entry(call).and_modify(|count| *count += 1).or_insert(1);
        let faulty = Examined::new(pair(), |faults| faults.fail(call, *nth, CUresult::UNKNOWN, When::Before));
        let turned: Vec<_> = sound
            .rows()
            .zip(faulty.rows())
            .filter(|((section, _), _)| *section != "after")
            .filter(|((_, before), (_, after))| before.answer != after.answer)
            .map(|(_, (section, row))| (section, row.id.as_str(), row.answer.clone()))
            .collect();
        let no = Answer::No(Culprit { call: Some(call), code: Some(CUresult::UNKNOWN) });
        assert_eq!(turned, [(section, id, no)], "call {nth} of {call}");
        // What a driver refuses to take back is told; nothing else is left.
        if faulty.driver.stranded().is_empty() {
            faulty.require_clean();
        } else {
            assert!(UNDOING.contains(&call), "call {nth} of {call}");
            assert_eq!(faulty.row("after", "left_behind").answer, Answer::Warning, "call {nth} of {call}");
        }
    }
}

#[test]
fn a_device_that_lacks_something_is_told_by_the_call_that_said_so() {
    let mut machine =
        pair().driver_version(12020).numa_nodes([NumaNode { id: 0, memory: 1 << 30 }, NumaNode { id: 3, memory: 0 }]);
    for device in &mut machine.devices {
        device.peers.clear();
        for attribute in [103, 107, 110, 124] {
            device.attributes.remove(&attribute);
        }
    }
    let found = Examined::new(machine, |_| ());
    for device in ["device0", "device1"] {
        assert_eq!(found.row(device, "memory").answer, Answer::Yes);
        assert_eq!(found.row(device, "copies").answer, Answer::Yes);
        for id in ["posix_fd", "rdma", "compression"] {
            found.require_no(device, id, Call::cuMemCreate, CUresult::NOT_SUPPORTED);
        }
    }
    found.require_no("device0", "peer_1", Call::cuMemSetAccess, CUresult::INVALID_VALUE);
    found.require_no("device1", "peer_0", Call::cuMemSetAccess, CUresult::INVALID_VALUE);
    found.require_no("host_memory", "host", Call::cuMemCreate, CUresult::INVALID_VALUE);
    assert_eq!(found.row("host_memory", "host_node_0").answer, Answer::Yes);
    found.require_no("host_memory", "host_node_3", Call::cuMemCreate, CUresult::OUT_OF_MEMORY);
    let missing = found.row("driver", "missing_calls");
    assert!(missing.detail.contains("cuStreamGetDevice"), "it came with CUDA 12.8: {missing:?}");
    assert!(found.row("device0", "sharing").value["mps"].is_null(), "it is told since CUDA 12.3");
    assert!(found.works());
    found.require_clean();
}

/// The attribute promises fabric handles; only making one shows that they are refused.
#[test]
fn without_an_imex_channel_fabric_handles_are_refused_whatever_the_attribute_says() {
    let found = Examined::new(Machine::h200(), |_| ());
    assert_eq!(found.row("device0", "sharing").value["mps"], false);
    found.require_no("device0", "fabric", Call::cuMemCreate, CUresult::NOT_PERMITTED);
    assert!(found.row("device0", "fabric").cure.as_ref().unwrap().contains("IMEX"));
}

#[test]
fn a_window_of_addresses_bounds_the_longest_reservation() {
    let found = Examined::new(Machine::h200().address_window(1 << 40), |_| ());
    let row = found.row("driver", "reservation");
    assert_eq!((&row.answer, row.value.as_u64()), (&Answer::Fact, Some(1 << 40)), "{row:?}");
    let none = Examined::new(Machine::h200().address_window(0), |_| ());
    none.require_no("driver", "reservation", Call::cuMemAddressReserve, CUresult::OUT_OF_MEMORY);
    none.require_no("device0", "memory", Call::cuMemAddressReserve, CUresult::OUT_OF_MEMORY);
    assert!(!none.works());
    none.require_clean();
}

#[test]
fn a_device_without_memory_does_not_work() {
    let found = Examined::new(Machine::h200().device_memory(0), |_| ());
    found.require_no("device0", "memory", Call::cuMemCreate, CUresult::OUT_OF_MEMORY);
    assert!(!found.works());
    found.require_clean();
}
