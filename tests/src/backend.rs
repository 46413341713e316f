//! [`Backend`]: a driver to test on, with faults in front of it and a ledger of what it did.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use cuvmm::{Call, Device, Driver, HandleKind, Options, VirtualMemoryResource};
use cuvmm_driver::{Hooked, RawDriver, Table};
use cuvmm_sim::faults::{Both, Faults, Ledger};
use cuvmm_sim::{Live, Machine, Preset, Simulator};

use crate::gone::Trail;
use crate::memory::G;
use crate::peer::Peer;
use crate::watch::{Watched, Watches};

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

/// A driver to test on. Calls are noted where a test asked for it, go through [`faults`](Self::faults), then past a
/// [`ledger`](Self::ledger) that sees what the driver really did.
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
    watches: Watches,
    pub(crate) trail: Trail,
    test: &'static str,
    left: Mutex<Left>,
}

/// What is left alive on purpose, because a call that would have undone it was made to fail, or could not be made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Reservations.
    pub reservations: usize,
    /// References to physical memory.
    pub allocations: usize,
    /// Mappings.
    pub mappings: usize,
    /// Events.
    pub events: usize,
    /// References to primary contexts.
    pub contexts: usize,
    /// Streams.
    pub streams: usize,
    /// User objects, which a ledger doesn't count.
    pub user_objects: usize,
    /// What the library counted as stranded.
    pub stranded: usize,
    /// Those of the references whose handle was imported.
    pub imported: usize,
    /// The bytes of the first device that these references and mappings keep. Where a test does not say it, only that
    /// there are some is demanded, of the device or the host.
    pub bytes: Option<usize>,
}

impl Left {
    /// The bytes that are kept, where they are known: none by what keeps no memory.
    fn known_bytes(&self) -> Option<usize> {
        self.bytes.or((self.allocations + self.mappings == 0).then_some(0))
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            reservations: self.reservations + other.reservations,
            allocations: self.allocations + other.allocations,
            mappings: self.mappings + other.mappings,
            events: self.events + other.events,
            contexts: self.contexts + other.contexts,
            streams: self.streams + other.streams,
            user_objects: self.user_objects + other.user_objects,
            stranded: self.stranded + other.stranded,
            imported: self.imported + other.imported,
            bytes: self.known_bytes().zip(other.known_bytes()).map(|(left, more)| left + more),
        }
    }

    /// This as a ledger has it, which counts neither bytes nor user objects, nor what was imported.
    fn in_ledger(self) -> Self {
        Self { imported: 0, user_objects: 0, bytes: Some(0), ..self }
    }

    /// What is alive, where this is left beside what was.
    fn beside(self, was: &Live, is: &Live) -> Live {
        let mut live = was.clone();
        live.reservations += self.reservations;
        live.allocations += self.allocations;
        live.mappings += self.mappings;
        // An event that nobody destroys ends with its context.
        live.events = (live.events + self.events).min(is.events.max(live.events));
        live.contexts += self.contexts;
        live.streams += self.streams;
        live.user_objects += self.user_objects;
        live.imported += self.imported;
        let bytes = |live: &Live| live.device_bytes.get(&0).copied().unwrap_or(0);
        let is_of_the_host = self.known_bytes().is_none() && is.host_bytes > was.host_bytes;
        let more = self.known_bytes().unwrap_or_else(|| bytes(is).saturating_sub(bytes(was)));
        live.host_bytes += if is_of_the_host { is.host_bytes - was.host_bytes } else { 0 };
        // There are some.
        let more = if self.known_bytes().is_none() && !is_of_the_host { more.max(1) } else { more };
        if more > 0 {
            *live.device_bytes.entry(0).or_default() += more;
        }
        live
    }
}

/// What was alive and stranded at some moment.
#[derive(Clone, Debug)]
pub struct Mark {
    live: Live,
    stranded: usize,
}

impl Backend {
    /// Runs a test, and demands that it leaves behind what it said, which is nothing if it said nothing, and did
    /// nothing undefined.
    pub fn run(kind: Kind, test: &'static str, body: fn(&Self)) {
        let backend = Self::open(kind, test);
        body(&backend);
        backend.finish();
    }

    /// Demands what [`run`](Self::run) does of a backend whose work is over.
    pub fn finish(self) {
        self.require_clean();
        let left = *self.left.lock().unwrap();
        let expect = |live: &Live| left.in_ledger().beside(&Live::default(), live);
        let (is, expected) = self.settled(|| self.ledger.live(), expect, left.stranded);
        assert_eq!(is, expected, "left behind, and stranded");
        if self.simulator.is_some() {
            let expect = |live: &Live| left.beside(&Live::default(), live);
            let (is, expected) = self.settled(|| self.live(), expect, left.stranded);
            assert_eq!(is, expected, "left behind in the simulator, and stranded");
        }
        // Once more: what was dropped without waiting is gone by now.
        self.require_clean();
        if left.reservations + left.mappings == 0 {
            assert_eq!(self.remains_of_all(), [], "left behind by the driver's word");
        }
    }

    /// What is alive and stranded, once that is what is expected, or else after a while. What is dropped without waiting goes
    /// later. A process that a test beside this one starts has copies of all descriptors until it executes its program, and
    /// they hold memory.
    fn settled(
        &self,
        live: impl Fn() -> Live,
        expect: impl Fn(&Live) -> Live,
        stranded: usize,
    ) -> ((Live, usize), (Live, usize)) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let is = (live(), self.driver.stranded().total());
            let expected = (expect(&is.0), stranded);
            if is == expected || Instant::now() > deadline {
                return (is, expected);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What is alive and stranded now.
    pub fn mark(&self) -> Mark {
        Mark { live: self.live(), stranded: self.driver.stranded().total() }
    }

    /// Demands that nothing was left alive or stranded, or lost, since then.
    #[track_caller]
    pub fn require_unchanged(&self, since: &Mark) {
        self.require_left(since, Left::default());
    }

    /// Demands that exactly this was left since then, and lets the test end with it.
    #[track_caller]
    pub fn require_left(&self, since: &Mark, left: Left) {
        self.require_left_by(since, left, "it");
    }

    /// Demands that exactly this was left since then by `whom`, and lets the test end with it.
    #[track_caller]
    pub(crate) fn require_left_by(&self, since: &Mark, left: Left, whom: &str) {
        let counted = if self.simulator.is_some() { left } else { left.in_ledger() };
        let expect = |live: &Live| counted.beside(&since.live, live);
        let (is, expected) = self.settled(|| self.live(), expect, since.stranded + left.stranded);
        assert_eq!(is, expected, "what {whom} left alive, and stranded");
        self.require_stays(left);
    }

    /// Demands that this is left when the test ends, beside what else is.
    pub fn require_stays(&self, left: Left) {
        let mut sum = self.left.lock().unwrap();
        *sum = sum.plus(left);
    }

    /// Demands that `work` makes no call.
    #[track_caller]
    pub fn require_no_call<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = self.ledger.total();
        let result = work();
        let calls: Vec<String> = self.ledger.log_since(before).iter().map(ToString::to_string).collect();
        assert_eq!(calls, [""; 0], "calls");
        result
    }

    /// Takes notes of the arguments of all later calls of that name.
    pub fn watch(&self, call: Call) -> Watched {
        self.watches.watch(call)
    }

    /// Opens a backend. A GPU that isn't there is a failure and no silent pass.
    pub fn open(kind: Kind, test: &'static str) -> Self {
        Self::open_on(kind, test, |machine| machine)
    }

    /// Another driver of the same kind. Where it is simulated, its machine has an IMEX channel: fabric handles can be had.
    pub fn with_channel(&self) -> Self {
        Self::open_on(self.kind, self.test, Machine::with_imex)
    }

    fn open_on(kind: Kind, test: &'static str, change: impl FnOnce(Machine) -> Machine) -> Self {
        let (watches, faults, ledger, trail) = (Watches::default(), Faults::new(), Ledger::new(), Trail::default());
        let machine = match kind {
            Kind::Strict | Kind::Measured => Some(Machine::h200()),
            Kind::StrictPair | Kind::MeasuredPair => Some(Machine::h200_pair()),
            Kind::Gpu | Kind::GpuPair => None,
        };
        let machine = machine.map(|machine| if Peer::sees_one() { machine.visible(&[0]) } else { machine });
        let strict = matches!(kind, Kind::Strict | Kind::StrictPair);
        let preset = if strict { Preset::Strict } else { Preset::Measured };
        let simulator = machine.map(|machine| Simulator::new(change(machine.preset(preset))));
        let hooks = (watches.clone(), faults.clone(), Both { outer: ledger.clone(), inner: trail.clone() });
        let driver = match &simulator {
            Some(simulator) => hooked(simulator.clone(), hooks),
            None => hooked(Table::load().expect("a driver on this machine"), hooks),
        };
        let device = driver.device(0).expect("a device");
        if kind == Kind::GpuPair && !Peer::sees_one() {
            driver.device(1).expect("a second device");
        }
        Self { kind, driver, device, faults, ledger, simulator, watches, trail, test, left: Mutex::default() }
    }

    /// Another driver of the same kind, for values that must never meet this one's.
    pub fn another(&self) -> Self {
        Self::open(self.kind, self.test)
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
        self.resource_with(Options::new())
    }

    /// A resource whose memory can be exported.
    pub fn shareable(&self) -> VirtualMemoryResource {
        self.resource_with(Options::new().handle_kind(HandleKind::PosixFd))
    }

    /// A resource of the first device with these options.
    #[track_caller]
    pub fn resource_with(&self, options: Options) -> VirtualMemoryResource {
        VirtualMemoryResource::new(&self.device, options).expect("a resource")
    }

    /// Has all gone by now that was left to another thread before, but for what waits for work.
    pub(crate) fn let_go(&self) {
        let resource = self.resource();
        resource.allocate(G).expect("some memory").close_deferred();
        resource.drain(Instant::now() + Duration::from_secs(30)).expect("nothing that stays pending");
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

/// Starts a driver behind these hooks, of which the first sees a call first.
fn hooked(raw: impl RawDriver + 'static, (watches, faults, done): (Watches, Faults, Both<Ledger, Trail>)) -> Driver {
    let seen = Hooked::new(Hooked::new(Hooked::new(raw, done), faults), watches);
    Driver::new(seen).expect("a driver that starts")
}
