//! A simulated driver whose calls can be made to fail, and resources of it.
#![allow(dead_code, reason = "each suite uses its part of it")]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use cuvmm_driver::{Call, Device, Driver, Hooked};
use cuvmm_resource::{Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Faults, Live, Machine, Preset, Simulator};

/// The granularity of the small machine's memory.
pub(crate) const G: usize = 64 << 10;
/// The granularity of reservations.
pub(crate) const R: usize = 2 << 20;

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

    pub(crate) fn device(&self) -> Device {
        self.driver.device(0).unwrap()
    }

    /// A resource of the first device.
    pub(crate) fn resource(&self, options: Options) -> VirtualMemoryResource {
        VirtualMemoryResource::new(&self.device(), options).unwrap()
    }

    pub(crate) fn plain(&self) -> VirtualMemoryResource {
        self.resource(Options::new())
    }

    pub(crate) fn count(&self, call: Call) -> usize {
        self.simulator.calls().iter().filter(|made| **made == call).count()
    }

    pub(crate) fn bytes_of(&self, buffer: &VirtualMemoryBuffer) -> Vec<u8> {
        self.simulator.peek(buffer.address(), buffer.size()).unwrap()
    }

    /// Nothing is left, nothing undefined was done, and nothing was lost.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.simulator.live(), Live::default());
        assert_eq!(self.simulator.violations(), []);
        assert_eq!(self.driver.stranded().total(), 0, "{:?}", self.driver.stranded());
    }

    /// No call reached the driver since the start, or since they were last forgotten.
    #[track_caller]
    pub(crate) fn assert_no_call(&self) {
        assert_eq!(self.simulator.calls(), []);
    }
}
