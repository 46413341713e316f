//! What is kept is mapped again, as memory that is made would be.

use std::thread;

use cuvmm::driver::sys::{CUmemAccess_flags, CUmemLocation};
use cuvmm::{
    Access, CUresult, Call, GrowOptions, GrowthPolicy, Level, Location, OnDrop, Options, Outcome, Recycling, Release,
    VirtualMemoryBuffer,
};
use cuvmm_sim::When;
use cuvmm_tests::{Backend, G, Gate, Graph, Left, ROOM, Stream, await_graphs, bytes_of, drain, occupy_behind};

use crate::{BUDGET, handles, keep, kept, options, recycling};

pub(crate) fn a_chunk_that_is_kept_is_mapped_and_none_is_made(backend: &Backend) {
    let resource = recycling(backend);
    assert_eq!(resource.options().recycling, Some(Recycling::up_to(BUDGET)));
    let buffer = resource.allocate(3 * G).unwrap();
    let chunks = handles(&buffer);
    let (calls, ()) = backend.calls_here(|| buffer.close().unwrap());
    assert_eq!(calls, [Call::cuCtxGetCurrent, Call::cuMemUnmap, Call::cuMemAddressFree]);
    assert_eq!((kept(&resource), resource.statistics().physical.now), (3 * G, 3 * G));

    let (calls, again) = backend.calls_here(|| resource.allocate(3 * G).unwrap());
    assert_eq!(calls, [Call::cuMemAddressReserve, Call::cuMemMap, Call::cuMemSetAccess]);
    assert_eq!(handles(&again), chunks);
    let statistics = resource.statistics();
    assert_eq!((statistics.recycled, statistics.trimmed), (1, 0));
    assert_eq!(
        (statistics.kept, statistics.physical),
        (Level { now: 0, peak: 3 * G }, Level { now: 3 * G, peak: 3 * G })
    );
    again.close().unwrap();
    assert_eq!(resource.trim(0).unwrap(), 3 * G);
    let statistics = resource.statistics();
    assert_eq!((statistics.trimmed, statistics.kept.now, statistics.physical.now), (1, 0, 0));
}

pub(crate) fn a_grow_takes_what_is_kept(backend: &Backend) {
    let resource = recycling(backend);
    let chunk = keep(&resource, 2 * G);
    let buffer = resource.allocate_with_capacity(G, ROOM).unwrap();
    let (calls, grown) = backend.calls_here(|| buffer.grow(3 * G).unwrap());
    assert_eq!(calls, [Call::cuMemMap, Call::cuMemSetAccess]);
    assert_eq!((grown.outcome(), handles(&grown)[1]), (Some(Outcome::InPlace), chunk));
    grown.close().unwrap();
    let occupied = occupy_behind(&buffer);
    keep(&resource, ROOM);
    let made = backend.ledger.count(Call::cuMemCreate);
    let moved = buffer.grow(ROOM + G).unwrap();
    assert_eq!((moved.outcome(), backend.ledger.count(Call::cuMemCreate)), (Some(Outcome::Moved), made));
    drop((moved, buffer, occupied));
}

pub(crate) fn only_a_chunk_of_exactly_that_size_is_taken_and_the_youngest_first(backend: &Backend) {
    let resource = recycling(backend);
    let buffers = [2, 3, 2].map(|granules| resource.allocate(granules * G).unwrap());
    let [first, other, last] = [0, 1, 2].map(|index: usize| handles(&buffers[index])[0]);
    buffers.into_iter().for_each(|buffer| buffer.close().unwrap());
    let made = backend.ledger.count(Call::cuMemCreate);
    let [smaller, larger] = [G, 4 * G].map(|size| resource.allocate(size).unwrap());
    assert_eq!((backend.ledger.count(Call::cuMemCreate), kept(&resource)), (made + 2, 7 * G));
    let taken = [2, 2, 3].map(|granules| resource.allocate(granules * G).unwrap());
    assert_eq!([0, 1, 2].map(|index: usize| handles(&taken[index])[0]), [last, first, other]);
    assert_eq!((backend.ledger.count(Call::cuMemCreate), kept(&resource)), (made + 2, 0));
    drop((smaller, larger, taken));
}

pub(crate) fn what_moved_is_kept_when_the_last_alias_goes(backend: &Backend) {
    let resource = recycling(backend);
    let buffer = resource.allocate(ROOM).unwrap();
    let occupied = occupy_behind(&buffer);
    let moved = buffer.grow(ROOM + G).unwrap();
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    let alias = moved.truncate(ROOM).unwrap();
    buffer.close().unwrap();
    assert_eq!(kept(&resource), 0, "the moved one has it");
    moved.close().unwrap();
    assert_eq!(kept(&resource), G, "the alias has the rest");
    alias.close().unwrap();
    assert_eq!(kept(&resource), ROOM + G);
    drop(occupied);
}

pub(crate) fn what_is_cut_off_is_kept(backend: &Backend) {
    let resource = recycling(backend);
    let buffer = resource.allocate_with_capacity(G, ROOM).unwrap().grow_into(3 * G).unwrap().grow_into(4 * G).unwrap();
    let cut = buffer.truncate_into(G).unwrap();
    assert_eq!(kept(&resource), 3 * G);
    let (calls, grown) = backend.calls_here(|| cut.grow_into(3 * G).unwrap());
    assert_eq!((calls, kept(&resource)), (vec![Call::cuMemMap, Call::cuMemSetAccess], G));
    grown.close().unwrap();
}

pub(crate) fn what_a_graph_had_is_kept_when_the_graph_is_gone(backend: &Backend) {
    let resource = recycling(backend);
    let stream = Stream::non_blocking(&backend.device);
    let buffer = resource.allocate(G).unwrap();
    let graph = Graph::fill(&stream, &buffer, 7);
    graph.retain(&buffer).unwrap();
    let executable = graph.instantiate(&stream);
    drop(graph);
    buffer.close().unwrap();
    assert_eq!(kept(&resource), 0);
    let made = backend.ledger.count(Call::cuMemCreate);
    let other = resource.allocate(G).unwrap();
    assert_eq!(backend.ledger.count(Call::cuMemCreate), made + 1, "the graph has it");
    other.fill(0, G, 1).unwrap();
    executable.launch(&stream);
    stream.synchronize().unwrap();
    assert_eq!(bytes_of(&other), [1; G]);
    drop(executable);
    await_graphs(&resource);
    assert_eq!(kept(&resource), G);
    other.close().unwrap();
}

pub(crate) fn what_is_left_to_the_reaper_is_kept_when_its_work_is_over(backend: &Backend) {
    let resource = backend.resource_with(options().on_drop(OnDrop::Defer));
    let stream = Stream::non_blocking(&backend.device);
    let buffer = resource.allocate(2 * G).unwrap();
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let gate = Gate::close(&stream);
    backend.require_no_call_here(|| drop(buffer));
    assert_eq!((resource.pending(), kept(&resource)), (1, 0));
    gate.open();
    drain(&resource);
    assert_eq!(kept(&resource), 2 * G);
}

pub(crate) fn a_chunk_of_another_resource_is_kept_by_that(backend: &Backend) {
    let [resource, other] = [(); 2].map(|()| recycling(backend));
    let buffer = resource.allocate_with_capacity(G, ROOM).unwrap();
    let grown = buffer.grow_into_with(3 * G, &GrowOptions::new().chunk_of(&other)).unwrap();
    grown.close().unwrap();
    assert_eq!([&resource, &other].map(kept), [G, 2 * G]);
}

pub(crate) fn zeroed_memory_is_zero_also_where_it_is_recycled(backend: &Backend) {
    let resource = recycling(backend);
    let used = |size| {
        let buffer = resource.allocate(size).unwrap();
        buffer.fill(0, size, 0x77).unwrap();
        buffer.close().unwrap();
    };
    used(2 * G);
    let buffer = resource.allocate(2 * G).unwrap();
    assert_eq!(bytes_of(&buffer), [0x77; 2 * G], "nothing clears it by itself");
    buffer.close().unwrap();
    let zeroed = resource.allocate_zeroed(2 * G).unwrap();
    assert_eq!(bytes_of(&zeroed), [0; 2 * G]);
    zeroed.close().unwrap();
    used(3 * G);
    let buffer = resource.allocate_with_capacity(G, ROOM).unwrap();
    buffer.fill(0, G, 0x11).unwrap();
    let grown = buffer.grow_with(4 * G, &GrowOptions::new().zeroed()).unwrap();
    assert_eq!(bytes_of(&grown), [[0x11; G].as_slice(), &[0; 3 * G]].concat());
    assert_eq!(resource.statistics().recycled, 3);
    drop((buffer, grown));
}

pub(crate) fn memory_of_the_host_is_recycled_too(backend: &Backend) {
    let resource = backend.resource_with(options().location(Location::Host));
    let buffer = resource.allocate(G).unwrap();
    buffer.fill(0, G, 0x77).unwrap();
    buffer.close().unwrap();
    let made = backend.ledger.count(Call::cuMemCreate);
    let buffer = resource.allocate_zeroed(G).unwrap();
    assert_eq!((bytes_of(&buffer), backend.ledger.count(Call::cuMemCreate)), (vec![0; G], made));
    buffer.close().unwrap();
}

/// What a device may do with a buffer.
fn access(backend: &Backend, ordinal: i32, buffer: &VirtualMemoryBuffer) -> CUmemAccess_flags {
    backend.driver.mem_get_access(CUmemLocation::device(ordinal), buffer.address()).unwrap()
}

pub(crate) fn a_recycled_chunk_has_the_access_of_its_resource(backend: &Backend) {
    let resource = backend.resource_with(options().own_access(Access::Read));
    let writing = recycling(backend);
    // Made by the one, it is also mapped by the other's options for a while.
    let buffer = writing.allocate_with_capacity(G, ROOM).unwrap();
    let grown = buffer.grow_into_with(2 * G, &GrowOptions::new().chunk_of(&resource)).unwrap();
    grown.close().unwrap();
    for (resource, flags) in [(&resource, CUmemAccess_flags::READ), (&writing, CUmemAccess_flags::READWRITE)] {
        let buffer = resource.allocate(G).unwrap();
        assert_eq!((access(backend, 0, &buffer), resource.statistics().recycled), (flags, 1));
        buffer.close().unwrap();
    }
}

pub(crate) fn a_recycled_chunk_has_the_access_of_its_resources_peers(backend: &Backend) {
    let peer = backend.driver.device(1).unwrap();
    let resource = backend.resource_with(options().peer(&peer, Access::Read));
    keep(&resource, G);
    let buffer = resource.allocate(G).unwrap();
    assert_eq!(resource.statistics().recycled, 1);
    let flags = [0, 1].map(|ordinal| access(backend, ordinal, &buffer));
    assert_eq!(flags, [CUmemAccess_flags::READWRITE, CUmemAccess_flags::READ]);
    buffer.close().unwrap();
}

pub(crate) fn a_chunk_that_can_not_be_mapped_is_kept_again(backend: &Backend) {
    let resource = recycling(backend);
    let buffer = resource.allocate_with_capacity(G, ROOM).unwrap();
    let chunk = keep(&resource, 2 * G);
    for call in [Call::cuMemMap, Call::cuMemSetAccess] {
        for grows in [false, true] {
            let mark = backend.mark();
            backend.faults.fail(call, 1, CUresult::UNKNOWN, When::Before);
            let error = if grows { buffer.grow(3 * G) } else { resource.allocate(2 * G) }.unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(call), Some(CUresult::UNKNOWN)));
            assert_eq!(kept(&resource), 2 * G);
            backend.require_unchanged(&mark);
        }
    }
    let buffer = buffer.grow_into(3 * G).unwrap();
    assert_eq!((handles(&buffer)[1], resource.statistics().recycled), (chunk, 1));
    buffer.close().unwrap();
}

pub(crate) fn what_a_failed_allocation_made_is_not_kept(backend: &Backend) {
    let resource = backend.resource_with(options().max_chunk(2 * G));
    keep(&resource, G);
    keep(&resource, 2 * G);
    let mark = backend.mark();
    // The first of three is recycled, the second made, and the third is not to be had.
    backend.faults.fail(Call::cuMemCreate, 2, CUresult::UNKNOWN, When::Before);
    let error = resource.allocate(6 * G).unwrap_err();
    assert_eq!(error.call(), Some(Call::cuMemCreate));
    assert_eq!((kept(&resource), resource.statistics().physical.now), (3 * G, 3 * G));
    backend.require_unchanged(&mark);
}

pub(crate) fn what_could_not_be_unmapped_is_not_kept(backend: &Backend) {
    let resource = recycling(backend);
    let buffer = resource.allocate(G).unwrap();
    backend.faults.fail(Call::cuMemUnmap, 1, CUresult::UNKNOWN, When::Before);
    let error = buffer.close().unwrap_err();
    assert_eq!((error.error().call(), kept(&resource)), (Some(Call::cuMemUnmap), 0));
    // Nor where another mapping of it went well after.
    let buffer = resource.allocate(ROOM).unwrap();
    let occupied = occupy_behind(&buffer);
    let moved = buffer.grow(ROOM + G).unwrap();
    backend.faults.fail(Call::cuMemUnmap, 1, CUresult::UNKNOWN, When::Before);
    buffer.close().unwrap_err();
    moved.close().unwrap();
    drop(occupied);
    assert_eq!(kept(&resource), G, "what was added was mapped once");
    backend.require_stays(Left { mappings: 2, reservations: 2, stranded: 2, bytes: Some(ROOM + G), ..Left::default() });
}

pub(crate) fn threads_share_what_is_kept(backend: &Backend) {
    const THREADS: usize = 4;
    let resource = backend.resource_with(options().recycling(Recycling::up_to(6 * G)));
    thread::scope(|scope| {
        for index in 0..THREADS {
            let resource = &resource;
            scope.spawn(move || {
                for round in 0..50 {
                    let size = (1 + (index + round) % 3) * G;
                    let buffer = resource.allocate(size).unwrap();
                    let value = (index * 50 + round) as u8;
                    buffer.copy_from_host(size - 8, &[value; 8]).unwrap();
                    let grown = buffer.grow(size + G).unwrap();
                    let mut seen = [0; 8];
                    grown.copy_to_host(size - 8, &mut seen).unwrap();
                    assert_eq!(seen, [value; 8], "nobody else has it");
                    match round % 3 {
                        0 => grown.close_deferred(),
                        1 => grown.close().unwrap(),
                        _ => drop(grown),
                    }
                    if round % 10 == 9 {
                        resource.trim(2 * G).unwrap();
                    }
                    buffer.close().unwrap();
                }
            });
        }
    });
    drain(&resource);
    let statistics = resource.statistics();
    assert!(statistics.kept.peak <= 6 * G && statistics.recycled > 0, "{statistics:?}");
    assert_eq!(statistics.physical.now, statistics.kept.now);
    resource.trim(0).unwrap();
    assert_eq!((resource.statistics().physical.now, backend.driver.stranded().total()), (0, 0));
}

/// Demands that `grow` releases no memory: that slows others down.
#[track_caller]
fn without_release<T>(backend: &Backend, grow: impl FnOnce() -> T) -> T {
    let (calls, grown) = backend.calls_here(grow);
    assert!(!calls.contains(&Call::cuMemRelease), "{calls:?}");
    grown
}

pub(crate) fn no_grow_releases_memory(backend: &Backend) {
    let policies = [GrowthPolicy::Exact, GrowthPolicy::Step(4 * G), GrowthPolicy::doubling()];
    for (growth, recycles) in policies.into_iter().flat_map(|growth| [(growth, false), (growth, true)]) {
        let chosen = if recycles { options() } else { Options::new().release(Release::Caller) };
        let resource = backend.resource_with(chosen.growth(growth).max_chunk(8 * G));
        let other = recycling(backend);
        (1..=8).for_each(|granules| _ = keep(&resource, granules * G));
        let mut buffer = resource.allocate_with_capacity(G, ROOM).unwrap();
        for (granules, options) in [
            (2, GrowOptions::new()),
            (5, GrowOptions::new().in_place()),
            (9, GrowOptions::new().zeroed()),
            (ROOM / G, GrowOptions::new().chunk_of(&other)),
        ] {
            let size = granules * G;
            let grown = without_release(backend, || buffer.grow_with(size, &options).unwrap());
            assert_ne!(grown.outcome(), Some(Outcome::Moved));
            grown.close().unwrap();
            buffer = without_release(backend, || buffer.grow_into_with(size, &options).unwrap());
            assert_ne!(buffer.outcome(), Some(Outcome::Moved));
        }
        let occupied = occupy_behind(&buffer);
        let moved = without_release(backend, || buffer.grow(2 * ROOM).unwrap());
        assert_eq!(moved.outcome(), Some(Outcome::Moved));
        moved.close().unwrap();
        let moved = without_release(backend, || buffer.grow_into(2 * ROOM).unwrap());
        assert_eq!(moved.outcome(), Some(Outcome::Moved));
        drop((moved, occupied));
    }
    // Where there is not all that is wished for, nothing is undone: it is what there is, and no less than what is needed.
    for (chunk, needed, sizes) in [(1, 2, [1, 1, 1].as_slice()), (2, 4, &[1, 2, 1]), (2, 2, &[1, 2])] {
        let options = Options::new().release(Release::Caller).growth(GrowthPolicy::Step(8 * G)).max_chunk(chunk * G);
        let resource = backend.resource_with(options);
        let buffer = resource.allocate_with_capacity(G, ROOM).unwrap();
        backend.faults.fail(Call::cuMemCreate, 4 - chunk, CUresult::OUT_OF_MEMORY, When::Before);
        let grown = without_release(backend, || buffer.grow(needed * G).unwrap());
        // What is there beyond the size the next grow has without a call.
        let all = backend.require_no_call(|| grown.grow(sizes.iter().sum::<usize>() * G).unwrap());
        let chunks: Vec<usize> = all.chunks().iter().map(|chunk| chunk.size / G).collect();
        assert_eq!((grown.size(), chunks.as_slice()), (needed * G, sizes));
        drop((all, grown, buffer));
    }
}
