//! A simulated driver whose calls can be made to fail, and handles of it.
#![allow(dead_code, reason = "each suite uses its part of it")]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::sync::Arc;

use cuvmm_driver::sys::{CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp, CUresult};
use cuvmm_driver::{Call, Driver, Hooked, StrandedKind};
use cuvmm_handles::{Allocation, Granularity, Mapping, Reservation};
use cuvmm_sim::{Faults, Live, Machine, Preset, Simulator};

/// The granularity of the small machine's memory.
pub(crate) const G: usize = 64 << 10;
/// The granularity of reservations.
pub(crate) const R: usize = 2 << 20;

/// What injected failures fail with: codes that drivers give, and one that nobody knows.
pub(crate) const CODES: [CUresult; 4] =
    [CUresult::INVALID_VALUE, CUresult::OUT_OF_MEMORY, CUresult::NOT_PERMITTED, CUresult(4242)];

pub(crate) struct Bench {
    pub(crate) simulator: Simulator,
    pub(crate) driver: Driver,
    pub(crate) faults: Faults,
}

impl Bench {
    pub(crate) fn new(machine: Machine) -> Self {
        let simulator = Simulator::new(machine);
        let faults = Faults::new();
        let driver = Driver::new(Hooked::new(simulator.clone(), faults.clone())).unwrap();
        simulator.clear_calls();
        Self { simulator, driver, faults }
    }

    pub(crate) fn small() -> Self {
        Self::new(Machine::small())
    }

    /// One of each preset.
    pub(crate) fn presets() -> [Self; 2] {
        [Preset::Strict, Preset::Measured].map(|preset| Self::new(Machine::small().preset(preset)))
    }

    pub(crate) fn properties(&self, kind: CUmemAllocationHandleType) -> CUmemAllocationProp {
        CUmemAllocationProp::pinned(self.driver.device(0).unwrap().location(), kind)
    }

    /// Memory of so many times [`G`], without a handle kind.
    pub(crate) fn memory(&self, units: usize) -> Arc<Allocation> {
        self.memory_for(units, CUmemAllocationHandleType::NONE)
    }

    pub(crate) fn memory_for(&self, units: usize, kind: CUmemAllocationHandleType) -> Arc<Allocation> {
        let size = Granularity::new(G).unwrap().exact(units * G).unwrap();
        Arc::new(Allocation::create(&self.driver, size, &self.properties(kind)).unwrap())
    }

    /// Addresses of so many times [`R`].
    pub(crate) fn addresses(&self, units: usize) -> Arc<Reservation> {
        let size = Reservation::GRANULARITY.exact(units * R).unwrap();
        Arc::new(Reservation::reserve(&self.driver, size, 0).unwrap())
    }

    /// The device's own access.
    pub(crate) fn access(&self) -> Arc<[CUmemAccessDesc]> {
        let location = self.driver.device(0).unwrap().location();
        Arc::new([CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE }])
    }

    /// One mapping that holds the only shares of its addresses and its memory.
    pub(crate) fn mapping(&self) -> Mapping {
        Mapping::map(&self.addresses(1), 0, self.memory(1), self.access()).unwrap()
    }

    pub(crate) fn count(&self, call: Call) -> usize {
        self.simulator.calls().iter().filter(|made| **made == call).count()
    }

    /// How many reservations, allocations and mappings were stranded, and how much else.
    pub(crate) fn stranded(&self) -> [usize; 4] {
        let count = |kind| self.driver.stranded().count(kind);
        let [reservations, allocations, mappings] =
            [StrandedKind::Reservation, StrandedKind::Allocation, StrandedKind::Mapping].map(count);
        [reservations, allocations, mappings, self.driver.stranded().total() - reservations - allocations - mappings]
    }

    /// Nothing is left, nothing undefined was done, and nothing was lost.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.simulator.live(), Live::default());
        assert_eq!(self.simulator.violations(), []);
        assert_eq!(self.stranded(), [0; 4]);
    }

    /// No call reached the driver since the start, or since they were last forgotten.
    #[track_caller]
    pub(crate) fn assert_no_call(&self) {
        assert_eq!(self.simulator.calls(), []);
    }
}
