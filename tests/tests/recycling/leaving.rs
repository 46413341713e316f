//! How what is kept goes: over the budget, too old, trimmed, where memory is short, and with its resource.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cuvmm::resource::Error;
use cuvmm::{CUresult, Call, GrowthPolicy, Level, Location, OnDrop, Options, Recycling, Release, VirtualMemoryBuffer};
use cuvmm_sim::When;
use cuvmm_tests::{Backend, G, Gate, Left, ROOM, Stream, after, in_host_function, until};

use crate::{BUDGET, handles, keep, kept, options, recycling};

pub(crate) fn the_budget_holds_and_the_oldest_go_first(backend: &Backend) {
    let resource = backend.resource_with(options().recycling(Recycling::up_to(5 * G)));
    let sizes = [2, 1, 2, 1];
    let buffers = sizes.map(|granules| resource.allocate(granules * G).unwrap());
    let chunks = buffers.each_ref().map(|buffer| handles(buffer)[0]);
    buffers.into_iter().for_each(|buffer| buffer.close().unwrap());
    let statistics = resource.statistics();
    assert_eq!((statistics.kept, statistics.trimmed), (Level { now: 4 * G, peak: 5 * G }, 1));
    let taken = [1, 2, 1].map(|granules| resource.allocate(granules * G).unwrap());
    assert_eq!(taken.each_ref().map(|buffer| handles(buffer)[0]), [chunks[3], chunks[2], chunks[1]]);
    drop(taken);
    // One that is larger than the budget makes no room for itself.
    assert_eq!(kept(&resource), 4 * G);
    keep(&resource, 6 * G);
    assert_eq!((kept(&resource), resource.statistics().physical.now), (4 * G, 4 * G));
}

pub(crate) fn a_chunk_that_is_too_old_is_released(backend: &Backend) {
    let [young, old] = [Duration::from_millis(30), Duration::from_secs(3600)].map(|age| {
        let resource = backend.resource_with(options().recycling(Recycling::up_to(BUDGET).for_at_most(age)));
        keep(&resource, 2 * G);
        keep(&resource, 3 * G);
        resource
    });
    until("what is too old", || young.statistics().physical.now == 0);
    assert_eq!((young.statistics().trimmed, kept(&young)), (2, 0));
    // Also when nothing was kept for a while.
    keep(&young, G);
    until("what is too old", || young.statistics().physical.now == 0);
    assert_eq!(kept(&old), 5 * G);
    drop((young, old));
}

pub(crate) fn trimming_releases_the_oldest_and_no_more_than_asked_for(backend: &Backend) {
    let resource = recycling(backend);
    let buffers = [1, 2, 3].map(|granules| resource.allocate(granules * G).unwrap());
    buffers.into_iter().for_each(|buffer| buffer.close().unwrap());
    assert_eq!(backend.require_no_call(|| resource.trim(6 * G).unwrap()), 0);
    assert_eq!((resource.trim(5 * G).unwrap(), kept(&resource)), (G, 5 * G));
    assert_eq!((resource.trim(4 * G).unwrap(), kept(&resource)), (2 * G, 3 * G));
    assert_eq!((resource.trim(0).unwrap(), kept(&resource)), (3 * G, 0));
    assert_eq!(backend.require_no_call(|| resource.trim(0).unwrap()), 0);
    let plain = backend.resource();
    assert_eq!(backend.require_no_call(|| plain.trim(0).unwrap()), 0);
}

pub(crate) fn trimming_goes_on_past_a_failure_and_tells_the_first(backend: &Backend) {
    let resource = recycling(backend);
    let buffers = [1, 2, 3].map(|granules| resource.allocate(granules * G).unwrap());
    buffers.into_iter().for_each(|buffer| buffer.close().unwrap());
    backend.faults.fail(Call::cuMemRelease, 1, CUresult::UNKNOWN, When::Before);
    backend.faults.fail(Call::cuMemRelease, 2, CUresult::INVALID_VALUE, When::Before);
    let error = resource.trim(0).unwrap_err();
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemRelease), Some(CUresult::UNKNOWN)));
    assert_eq!((kept(&resource), resource.statistics().physical.now), (0, 3 * G));
    backend.require_stays(Left { allocations: 2, stranded: 2, bytes: Some(3 * G), ..Left::default() });
}

pub(crate) fn trimming_in_a_host_function_is_refused(backend: &Backend) {
    let resource = recycling(backend);
    keep(&resource, G);
    let stream = Stream::non_blocking(&backend.device);
    let clone = resource.clone();
    let refused = in_host_function(&stream, move || clone.trim(0));
    assert_eq!(refused, Err(Error::HostCallback));
    assert_eq!(kept(&resource), G);
    backend.require_questions(1);
}

/// Counts how often it is asked, and does `relief`.
fn counted(relief: impl Fn() -> bool + Send + Sync + 'static) -> (Arc<AtomicUsize>, Options) {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let options = options().on_out_of_memory(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        relief()
    });
    (asked, options)
}

fn run_short(backend: &Backend, times: usize) {
    (1..=times).for_each(|nth| {
        backend.faults.fail(Call::cuMemCreate, nth, CUresult::OUT_OF_MEMORY, When::Before);
    });
}

pub(crate) fn where_memory_is_short_what_is_kept_goes_before_the_hook_is_asked(backend: &Backend) {
    let (asked, options) = counted(|| false);
    let resource = backend.resource_with(options);
    let buffers = [1, 2].map(|granules| resource.allocate(granules * G).unwrap());
    buffers.into_iter().for_each(|buffer| buffer.close().unwrap());
    run_short(backend, 1);
    let buffer = resource.allocate(5 * G).unwrap();
    assert_eq!((asked.load(Ordering::Relaxed), kept(&resource)), (0, 0));
    assert_eq!(resource.statistics().trimmed, 2);
    // A wish is no reason to release anything.
    buffer.close().unwrap();
    let growing = backend.resource_with(self::options().growth(GrowthPolicy::Step(8 * G)));
    let buffer = growing.allocate_with_capacity(G, ROOM).unwrap();
    keep(&growing, 3 * G);
    run_short(backend, 1);
    let grown = buffer.grow(2 * G).unwrap();
    assert_eq!((handles(&grown).len(), grown.chunks()[1].size, kept(&growing)), (2, G, 3 * G));
    assert_eq!(kept(&resource), 5 * G);
    drop((grown, buffer));
}

pub(crate) fn where_memory_is_short_what_other_resources_keep_goes_too(backend: &Backend) {
    let (asked, options) = counted(|| false);
    let (resource, plain) = (backend.resource_with(options), backend.resource());
    let others = [(); 2].map(|()| recycling(backend));
    let host = backend.resource_with(self::options().location(Location::Host));
    others.iter().chain([&host]).for_each(|other| _ = keep(other, 2 * G));
    keep(&resource, G);
    // The own is what goes first.
    run_short(backend, 1);
    resource.allocate(5 * G).unwrap().close().unwrap();
    assert_eq!((kept(&resource), others.each_ref().map(kept)), (5 * G, [2 * G; 2]));
    run_short(backend, 2);
    resource.allocate(6 * G).unwrap().close().unwrap();
    assert_eq!((others.each_ref().map(kept), asked.load(Ordering::Relaxed)), ([0; 2], 0));
    // Also for a resource that keeps nothing itself.
    run_short(backend, 1);
    plain.allocate(G).unwrap().close().unwrap();
    assert_eq!((kept(&resource), kept(&host)), (0, 2 * G), "memory of the host is another matter");
    // And of one that is gone.
    keep(&resource, G);
    drop(resource);
    run_short(backend, 1);
    // What is released by the library's thread by now is no help to the call that failed, and the next one does not.
    let buffer = plain.allocate(G).or_else(|_| plain.allocate(G)).unwrap();
    buffer.close().unwrap();
}

pub(crate) fn what_the_hook_frees_is_used_or_released(backend: &Backend) {
    for (size, creates) in [(2 * G, 1), (3 * G, 3)] {
        let spare = Arc::new(Mutex::new(None::<VirtualMemoryBuffer>));
        let given = Arc::clone(&spare);
        let (asked, options) = counted(move || {
            let buffer = given.lock().unwrap().take();
            buffer.is_some_and(|buffer| buffer.close().is_ok())
        });
        let resource = backend.resource_with(options);
        *spare.lock().unwrap() = Some(resource.allocate(2 * G).unwrap());
        run_short(backend, creates - creates / 2);
        let before = backend.ledger.count(Call::cuMemCreate);
        let buffer = resource.allocate(size).unwrap();
        // Failed calls do not reach the ledger.
        assert_eq!(backend.ledger.count(Call::cuMemCreate) - before, creates / 2, "{size}");
        assert_eq!((asked.load(Ordering::Relaxed), kept(&resource)), (1, 0));
        assert_eq!(resource.statistics().recycled, 1 - creates / 2);
        buffer.close().unwrap();
        backend.faults.clear();
        // What is left of it would be what the next one finds.
        resource.trim(0).unwrap();
    }
}

pub(crate) fn what_was_pending_is_used_where_memory_is_short(backend: &Backend) {
    let (asked, options) = counted(|| false);
    let resource = backend.resource_with(options);
    let stream = Stream::non_blocking(&backend.device);
    let buffer = resource.allocate(2 * G).unwrap();
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let gate = Gate::close(&stream);
    buffer.close_deferred();
    // None can be made at all: what is pending is all that there is.
    run_short(backend, 100);
    let buffer = gate.open_after(Duration::from_millis(20), || resource.allocate(2 * G).unwrap());
    backend.faults.clear();
    assert_eq!((asked.load(Ordering::Relaxed), resource.statistics().recycled), (0, 1));
    buffer.close().unwrap();
}

pub(crate) fn with_nothing_kept_a_shortage_takes_no_call_more(backend: &Backend) {
    let hook = |_: &cuvmm::OutOfMemory| false;
    let plain = Options::new().release(Release::Caller).on_out_of_memory(hook);
    let calls = [plain, options().on_out_of_memory(hook)].map(|options| {
        let resource = backend.resource_with(options);
        run_short(backend, 1);
        let (calls, result) = backend.calls_here(|| resource.allocate(2 * G));
        assert!(matches!(result, Err(Error::OutOfMemory(_))), "{result:?}");
        calls
    });
    assert_eq!(calls[0], calls[1]);
}

pub(crate) fn a_resource_that_is_gone_keeps_nothing(backend: &Backend) {
    let resource = recycling(backend);
    keep(&resource, 2 * G);
    let [first, second] = [(); 2].map(|()| resource.allocate(G).unwrap());
    let clone = resource.clone();
    drop(clone);
    first.close().unwrap();
    assert_eq!(kept(&resource), 3 * G);
    drop(resource);
    assert_eq!(kept(second.resource()), 3 * G, "its buffer has it");
    let mark = backend.ledger.live().allocations;
    second.close().unwrap();
    until("what it kept", || backend.ledger.live().allocations == mark - 3);

    // What is left of a buffer after its resource goes at once.
    let resource = backend.resource_with(options().on_drop(OnDrop::Defer));
    let stream = Stream::non_blocking(&backend.device);
    let buffer = resource.allocate(G).unwrap();
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let gate = Gate::close(&stream);
    backend.require_no_call_here(|| drop((buffer, resource)));
    gate.open();
    until("what was pending", || backend.ledger.live().allocations == mark - 3);
}

pub(crate) fn closing_a_resource_releases_what_it_keeps(backend: &Backend) {
    let resource = recycling(backend);
    keep(&resource, 2 * G);
    let other = resource.clone();
    resource.close(after(Duration::from_secs(30))).unwrap();
    assert_eq!((kept(&other), other.statistics().physical.now), (0, 0));
    keep(&other, G);
    assert_eq!(kept(&other), G, "the other goes on");
}
