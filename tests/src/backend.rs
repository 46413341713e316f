//! [`Backend`]: a driver to test on, with faults in front of it and a ledger of what it did.

use cuvmm::{Device, Driver, HandleKind, Options, VirtualMemoryResource};
use cuvmm_driver::{Hooked, Table};
use cuvmm_sim::faults::{Faults, Ledger};
use cuvmm_sim::{Live, Machine, Preset, Simulator};

/// Which driver a test runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The simulator, enforcing the documented rules.
    Strict,
    /// The simulator, answering as measured drivers do.
    Measured,
    /// The system's driver.
    Gpu,
    /// The simulator with two linked devices, strict.
    StrictPair,
    /// The simulator with two linked devices, measured.
    MeasuredPair,
    /// The system's driver with at least two devices.
    GpuPair,
}

/// A driver to test on. Calls go through [`faults`](Self::faults), then past a [`ledger`](Self::ledger) that sees
/// what the driver really did.
pub struct Backend {
    /// Which.
    pub kind: Kind,
    /// The driver.
    pub driver: Driver,
    /// Its first device.
    pub device: Device,
    /// What makes calls fail.
    pub faults: Faults,
    /// What successful calls left alive.
    pub ledger: Ledger,
    /// The simulator behind the driver, where it is one.
    pub simulator: Option<Simulator>,
    test: &'static str,
}

impl Backend {
    /// Runs a test, and demands that it leaves nothing behind and did nothing undefined.
    pub fn run(kind: Kind, test: &'static str, body: fn(&Self)) {
        let backend = Self::open(kind, test);
        let before = backend.ledger.live();
        body(&backend);
        backend.require_clean();
        assert_eq!(backend.ledger.live(), before, "left behind");
        assert_eq!(backend.driver.stranded().total(), 0, "stranded");
        if let Some(simulator) = &backend.simulator {
            assert_eq!(simulator.live(), Live::default(), "left behind in the simulator");
        }
    }

    /// Opens a backend. A GPU that isn't there is a failure and no silent pass.
    pub fn open(kind: Kind, test: &'static str) -> Self {
        let (faults, ledger) = (Faults::new(), Ledger::new());
        let machine = match kind {
            Kind::Strict | Kind::Measured => Some(Machine::h200()),
            Kind::StrictPair | Kind::MeasuredPair => Some(Machine::h200_pair()),
            Kind::Gpu | Kind::GpuPair => None,
        };
        let strict = matches!(kind, Kind::Strict | Kind::StrictPair);
        let preset = if strict { Preset::Strict } else { Preset::Measured };
        let simulator = machine.map(|machine| Simulator::new(machine.preset(preset)));
        let driver = match &simulator {
            Some(simulator) => Driver::new(Hooked::new(Hooked::new(simulator.clone(), ledger.clone()), faults.clone())),
            None => {
                let table = Table::load().expect("a driver on this machine");
                Driver::new(Hooked::new(Hooked::new(table, ledger.clone()), faults.clone()))
            }
        };
        let driver = driver.expect("a driver that starts");
        let device = driver.device(0).expect("a device");
        if kind == Kind::GpuPair {
            driver.device(1).expect("a second device");
        }
        Self { kind, driver, device, faults, ledger, simulator, test }
    }

    /// The test's own path, as the harness has it.
    pub fn test(&self) -> &'static str {
        self.test
    }

    /// Whether it is a real driver.
    pub fn is_gpu(&self) -> bool {
        matches!(self.kind, Kind::Gpu | Kind::GpuPair)
    }

    /// A resource whose memory can't be exported.
    pub fn resource(&self) -> VirtualMemoryResource {
        VirtualMemoryResource::new(&self.device, Options::new()).expect("a resource")
    }

    /// A resource whose memory can be exported.
    pub fn shareable(&self) -> VirtualMemoryResource {
        let options = Options::new().handle_kind(HandleKind::PosixFd);
        VirtualMemoryResource::new(&self.device, options).expect("a resource of shareable memory")
    }

    /// Demands that nothing undefined was done.
    pub fn require_clean(&self) {
        if let Some(simulator) = &self.simulator {
            assert_eq!(simulator.violations(), [], "violations");
        }
    }

    /// What is alive: in the simulator, or by the ledger on a GPU.
    pub fn live(&self) -> Live {
        self.simulator.as_ref().map_or_else(|| self.ledger.live(), Simulator::live)
    }
}
