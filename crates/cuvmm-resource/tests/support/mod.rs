//! A simulated driver whose calls can be made to fail, and resources of it.
#![allow(dead_code, reason = "each suite uses its part of it")]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

pub(crate) mod work;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cuvmm_driver::{Call, Device, Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_resource::{Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::faults::Both;
use cuvmm_sim::{Faults, Live, Machine, Preset, Simulator};

/// The granularity of the small machine's memory.
pub(crate) const G: usize = 64 << 10;
/// The granularity of reservations.
pub(crate) const R: usize = 2 << 20;

pub(crate) struct Bench {
    pub(crate) simulator: Simulator,
    pub(crate) driver: Driver,
    pub(crate) faults: Faults,
    pub(crate) meanwhile: Meanwhile,
}

/// What happens right before a call reaches the driver, once.
#[derive(Clone, Default)]
pub(crate) struct Meanwhile {
    plan: Arc<Mutex<Option<(Call, Event)>>>,
}

type Event = Box<dyn FnOnce() + Send>;

impl Meanwhile {
    /// Does `event` before the next such call.
    pub(crate) fn before_next(&self, call: Call, event: impl FnOnce() + Send + 'static) {
        *self.plan.lock().unwrap() = Some((call, Box::new(event)));
    }

    /// Whether what was planned has happened.
    pub(crate) fn is_over(&self) -> bool {
        self.plan.lock().unwrap().is_none()
    }
}

impl Hook for Meanwhile {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let due = plan.take_if(|(call, _)| *call == invocation.call);
        drop(plan);
        if let Some((_, event)) = due {
            event();
        }
        None
    }
}

impl Bench {
    pub(crate) fn new(machine: Machine) -> Self {
        let simulator = Simulator::new(machine);
        let (faults, meanwhile) = (Faults::new(), Meanwhile::default());
        let hook = Both { outer: faults.clone(), inner: meanwhile.clone() };
        let driver = Driver::new(Hooked::new(simulator.clone(), hook)).unwrap();
        simulator.clear_calls();
        Self { simulator, driver, faults, meanwhile }
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

    /// How many mappings, reservations, allocations, events, streams and shares of contexts are alive.
    pub(crate) fn left(&self) -> [usize; 6] {
        let live = self.simulator.live();
        [live.mappings, live.reservations, live.allocations, live.events, live.streams, live.contexts]
    }

    /// Nothing is left, nothing undefined was done, and nothing was lost.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.simulator.live(), Live::default());
        assert_eq!(self.simulator.violations(), []);
        assert_eq!(self.driver.stranded().total(), 0, "{:?}", self.driver.stranded());
    }

    /// Waits until that holds, as it does once the reaper has let go of what it was left.
    #[track_caller]
    pub(crate) fn wait_until(&self, holds: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !holds(self) {
            assert!(Instant::now() < deadline, "{:?}, {:?}", self.simulator.live(), self.driver.stranded());
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// As [`assert_clean`](Self::assert_clean), after the reaper has let go of what it was left.
    #[track_caller]
    pub(crate) fn assert_clean_soon(&self) {
        self.wait_until(|bench| bench.simulator.live().is_empty());
        self.assert_clean();
    }

    /// No call reached the driver since the start, or since they were last forgotten.
    #[track_caller]
    pub(crate) fn assert_no_call(&self) {
        assert_eq!(self.simulator.calls(), []);
    }
}
