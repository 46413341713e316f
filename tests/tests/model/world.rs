//! Where a case happens: a simulated machine, its failures, resources, and what must hold when nobody works.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuvmm::{
    CUresult, Call, Driver, GrowthPolicy, HandleKind, Location, OnDrop, Options, Recycling, StreamRef,
    VirtualMemoryBuffer, VirtualMemoryResource,
};
use cuvmm_driver::Hooked;
use cuvmm_sim::faults::{Faults, Random, When};
use cuvmm_sim::{Hints, Machine, Preset, Simulator};
use cuvmm_tests::{FAILING, FAILING_CODES};
use proptest::prelude::*;

use crate::memory::{Modelled, Seen, Shared};

/// The granularity of the small machine's memory.
pub(crate) const G: usize = 64 << 10;
/// By how much memory is remembered, and who writes it.
pub(crate) const PAGE: usize = 4096;
/// How long what is queued may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// What every byte of fresh memory of a device reads as; the host's is zero.
const POISON: u8 = 0xA5;

/// The calls that work is queued by, which fail besides those that make or undo something. None that is waited with but
/// those that make a fence: after others nobody knows what runs.
const QUEUING: [Call; 5] =
    [Call::cuMemsetD8Async, Call::cuMemcpyHtoDAsync, Call::cuMemcpyDtoHAsync, Call::cuEventCreate, Call::cuEventRecord];

/// What a case is made of but its steps.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    preset: Preset,
    hints: Hints,
    is_host: bool,
    growth: GrowthPolicy,
    max_chunk: Option<usize>,
    recycling: Option<Recycling>,
    on_drop: OnDrop,
    /// What failures follow from, where there are any.
    failures: Option<u64>,
}

pub(crate) fn setup() -> impl Strategy<Value = Setup> {
    let preset = prop_oneof![Just(Preset::Strict), Just(Preset::Measured)];
    let refused = [CUresult::INVALID_VALUE, CUresult::OUT_OF_MEMORY].map(|code| Just(Hints::Refused(code)));
    let [invalid, exhausted] = refused;
    let hints = prop_oneof![3 => Just(Hints::Granted), 1 => Just(Hints::Elsewhere), 1 => invalid, 1 => exhausted];
    // What a policy adds behind the size is seen only where it is one chunk with what the size is in.
    let sizes = prop_oneof![
        3 => Just((GrowthPolicy::Exact, None)),
        2 => (1..9_usize).prop_map(|units| (GrowthPolicy::Exact, Some(units * G))),
        1 => (1..9_usize).prop_map(|units| (GrowthPolicy::Step(units * G), None)),
        1 => Just((GrowthPolicy::doubling(), None)),
    ];
    let on_drop = prop_oneof![Just(OnDrop::Wait), Just(OnDrop::Defer)];
    let recycling = prop_oneof![
        1 => Just(None),
        1 => (1..40_usize).prop_map(|units| Some(Recycling::up_to(units * G).shareable())),
    ];
    let failures = prop_oneof![1 => Just(None), 1 => any::<u64>().prop_map(Some)];
    (preset, hints, prop::bool::weighted(0.2), sizes, recycling, on_drop, failures).prop_map(
        |(preset, hints, is_host, (growth, max_chunk), recycling, on_drop, failures)| Setup {
            preset,
            hints,
            is_host,
            growth,
            max_chunk,
            recycling,
            on_drop,
            failures,
        },
    )
}

pub(crate) struct World {
    pub(crate) simulator: Simulator,
    pub(crate) driver: Driver,
    /// The same driver without failures.
    pub(crate) direct: Driver,
    pub(crate) faults: Faults,
    /// Whether calls fail.
    pub(crate) is_failing: bool,
    pub(crate) resource: VirtualMemoryResource,
    /// Another one of such memory, to grow by.
    pub(crate) other: VirtualMemoryResource,
    /// What fresh memory reads as, where that is known: what is recycled reads as its former buffer left it.
    pub(crate) fresh: Option<u8>,
    /// What a thread gave away and none has taken.
    pub(crate) pot: Mutex<Vec<Modelled>>,
    pub(crate) threads: usize,
    pub(crate) seen: Arc<Seen>,
}

impl World {
    pub(crate) fn new(setup: &Setup, threads: usize, seen: &Arc<Seen>) -> Self {
        let machine = Machine::small().device_memory(64 << 30).preset(setup.preset).hints(setup.hints);
        let simulator = Simulator::new(machine.poison(Some(POISON)));
        let faults = Faults::new();
        let driver = Driver::new(Hooked::new(simulator.clone(), faults.clone())).unwrap();
        let device = driver.device(0).unwrap();
        let location = if setup.is_host { Location::HostNumaCurrent } else { Location::Device };
        let options = || {
            let options = Options::new().location(location).handle_kind(HandleKind::PosixFd);
            let options = options.growth(setup.growth).on_drop(setup.on_drop);
            setup.recycling.into_iter().fold(options, Options::recycling)
        };
        let bounded = setup.max_chunk.map_or_else(options, |bytes| options().max_chunk(bytes));
        let resource = VirtualMemoryResource::new(&device, bounded).unwrap();
        let other = VirtualMemoryResource::new(&device, options()).unwrap();
        assert_eq!(resource.granularity().bytes(), G);
        Self {
            direct: simulator.driver().unwrap(),
            simulator,
            driver,
            faults,
            is_failing: setup.failures.is_some(),
            resource,
            other,
            fresh: setup.recycling.is_none().then_some(if setup.is_host { 0 } else { POISON }),
            pot: Mutex::default(),
            threads,
            seen: Arc::clone(seen),
        }
    }

    /// Lets calls fail from now on, where any are to.
    pub(crate) fn begin(&self, setup: &Setup) {
        if let Some(seed) = setup.failures {
            let random =
                Random::new(seed).per_thousand(30).calls([&FAILING[..], &QUEUING[..]].concat()).codes(FAILING_CODES);
            self.faults.fail_at_random(random.when(When::Before));
        }
    }

    pub(crate) fn stream(&self) -> StreamRef {
        StreamRef::create(self.resource.device()).unwrap()
    }

    /// What of an operation came to nothing: an error that a call failed with.
    pub(crate) fn excuse<T, E: Into<cuvmm::Error>>(&self, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.require_excused(&error.into())).ok()
    }

    pub(crate) fn require_excused(&self, error: &cuvmm::Error) {
        assert!(self.is_failing && error.code().is_some_and(|code| FAILING_CODES.contains(&code)), "{error:?}");
        Seen::add(&self.seen.failed);
    }

    /// How many calls of that name failed.
    fn failed(&self, call: Call) -> usize {
        self.faults.faults().iter().filter(|fault| fault.call == call).count()
    }

    /// Demands that what is alive is what is known of and what could not be undone, and that the numbers of the library
    /// are the driver's. Nobody works.
    pub(crate) fn check(&self, all: &[&Modelled], shared: &[&Shared]) {
        // Those that are gone were not always waited for.
        self.resource.drain(Instant::now() + PATIENCE).unwrap();
        assert_eq!(self.simulator.violations(), []);
        // Each once, however many buffers share it.
        let all_places = || all.iter().flat_map(|one| &one.places);
        let places: BTreeMap<_, _> = all_places().map(|place| (Arc::as_ptr(place), place.size())).collect();
        let handles: BTreeMap<_, _> = all_places().map(|place| (Arc::as_ptr(&place.handle), &place.handle)).collect();
        let held = handles.values().map(|handle| &handle.memory).chain(shared.iter().flat_map(|one| &one.memories));
        let memories: BTreeMap<_, _> = held.map(|memory| (Arc::as_ptr(memory), memory.size)).collect();
        let imported = handles.values().filter(|handle| handle.is_imported).count();

        let undoing = [Call::cuMemUnmap, Call::cuMemRelease, Call::cuMemAddressFree];
        let [unmaps, releases, frees] = undoing.map(|call| self.failed(call));
        let [one, two] = [&self.resource, &self.other].map(VirtualMemoryResource::statistics);
        let kept = one.kept.now + two.kept.now;
        let live = self.simulator.live();
        assert_eq!(live.mappings, places.len() + unmaps);
        // Of what is kept, each chunk is one more.
        let chunks = live.allocations - handles.len() - releases;
        assert!((chunks == 0) == (kept == 0) && chunks * G <= kept, "{chunks} chunks of {kept} bytes");
        assert!((imported..=imported + releases).contains(&live.imported), "{live:?}");
        let bytes: usize = memories.values().sum::<usize>() + kept;
        let made = live.device_bytes.values().sum::<usize>() + live.host_bytes;
        assert!(if unmaps + releases == 0 { made == bytes } else { made >= bytes }, "{made} of {bytes}");
        let mappings = all.iter().flat_map(|one| one.buffer.mappings());
        let reservations: BTreeSet<_> = mappings.map(|mapping| mapping.room().reservation().address()).collect();
        assert!(live.reservations >= reservations.len() + frees, "{live:?}");
        if all.is_empty() {
            assert!((frees..=frees + unmaps).contains(&live.reservations), "{live:?}");
        }
        let stranded = unmaps + releases + frees;
        assert_eq!(self.driver.stranded().total(), stranded, "{:?}", self.driver.stranded());

        assert_eq!((one.stranded + two.stranded, one.buffers, two.buffers), (stranded, all.len(), 0));
        assert_eq!((one.pending, two.pending), (0, 0));
        if stranded == 0 {
            let sum = |is_imported| -> usize {
                let those = handles.values().filter(|handle| handle.is_imported == is_imported);
                those.map(|handle| handle.memory.size).sum()
            };
            assert_eq!((one.mapped.now, two.mapped.now), (places.values().sum(), 0));
            assert_eq!((one.physical.now + two.physical.now, one.imported.now), (sum(false) + kept, sum(true)));
        }
    }

    /// Demands that nothing is left but what could not be undone.
    pub(crate) fn end(self) {
        self.check(&[], &[]);
        for resource in [&self.resource, &self.other] {
            Seen::add_all(&self.seen.recycled, resource.statistics().recycled);
            self.excuse(resource.trim(0));
        }
        self.check(&[], &[]);
        let (simulator, failing, direct) = (self.simulator.clone(), self.is_failing, self.direct.clone());
        let stranded = self.driver.stranded().total();
        drop(self);
        drop(direct);
        // Where a resource defers, its own stream goes a moment later.
        let deadline = Instant::now() + PATIENCE;
        while simulator.live().streams + simulator.live().contexts > 0 && Instant::now() < deadline {
            std::thread::yield_now();
        }
        let live = simulator.live();
        assert_eq!((live.streams, live.contexts, live.events), (0, 0, 0));
        assert!(live.is_empty() || failing && stranded > 0, "{live:?}");
    }
}

/// The buffer inside an error, where there is one, and the error.
pub(crate) fn kept(error: cuvmm::ResizeError) -> (cuvmm::resource::Error, VirtualMemoryBuffer, bool) {
    let is_resized = error.is_resized();
    let (error, buffer) = error.into_parts();
    (error, buffer, is_resized)
}
