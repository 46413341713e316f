//! Memory that graphs own: it is there as long as they can run, and no longer.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::thread;
use std::time::Duration;

use cuvmm::driver::sys::{CUdeviceptr, CUstreamCaptureMode};
use cuvmm::{Call, Outcome, Release, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_resource::{Error, OnDrop, Options};
use cuvmm_tests::{
    Backend, Current, Executable, G, Gate, Graph, Kernels, ROOM, Ranges, Stream, await_graphs, is_idle, occupy_behind,
    pattern, queue_copy, queue_fill, queue_fill_at, read_at, retain_in_capture,
};

cuvmm_tests::suite!(
    nodes_work_after_the_buffers_are_closed,
    nodes_work_after_the_buffers_are_dropped_and_deferred,
    nodes_work_after_the_buffers_are_grown_in_place,
    nodes_work_after_the_buffers_are_moved,
    nodes_work_after_the_buffers_are_cut_to_nothing,
    a_graph_that_was_made_by_hand_keeps_its_memory,
    the_memory_goes_with_the_last_executable,
    an_executable_destroyed_in_flight_keeps_the_memory_until_its_run_is_over,
    a_graph_that_goes_before_the_buffer_undoes_nothing,
    a_graph_may_be_given_the_same_memory_twice,
    a_graph_that_was_given_memory_of_many_buffers_gives_all_of_it_back,
    a_buffer_may_be_dropped_while_the_capture_goes_on,
    every_capture_outlives_being_given_memory,
    a_default_stream_that_captures_is_known_by_its_token,
    a_stream_that_does_not_capture_is_refused,
);

const THREAD_LOCAL: CUstreamCaptureMode = CUstreamCaptureMode::THREAD_LOCAL;
const QUARTER: usize = G / 4;
const FILLED: u8 = 0x5a;
const WORD: u32 = 0x0403_0201;

/// A graph's three kinds of nodes, and what they use.
struct Nodes {
    stream: StreamRef,
    executable: Executable,
    target: CUdeviceptr,
    /// After the executable, which uses them.
    _kernels: Kernels,
}

impl Nodes {
    /// Captures a fill, a copy from `source` and a kernel, each of a quarter of `target`. The graph owns both, and goes at
    /// once; what was instantiated stays.
    fn capture(source: &VirtualMemoryBuffer, target: &VirtualMemoryBuffer) -> Self {
        let stream = Stream::non_blocking(source.resource().device());
        let (kernels, address) = (Kernels::load(&stream), target.address());
        source.copy_from_host(0, &pattern(3, QUARTER)).unwrap();
        let graph = Graph::capture(&stream, THREAD_LOCAL, || {
            queue_fill_at(stream.driver(), &stream, address, QUARTER, FILLED);
            queue_copy(&stream, source.address(), behind(address, QUARTER), QUARTER);
            kernels.fill(&stream, behind(address, 2 * QUARTER), WORD, QUARTER / 4);
            retain_in_capture(source, &stream).unwrap();
            retain_in_capture(target, &stream).unwrap();
        });
        let executable = graph.instantiate(&stream);
        Self { stream, executable, target: address, _kernels: kernels }
    }

    /// Demands that all nodes do what they are to, more than once.
    #[track_caller]
    fn require_work(&self) {
        for _ in 0..2 {
            queue_fill_at(self.stream.driver(), &self.stream, self.target, G, 0);
            self.executable.launch(&self.stream);
            let seen = read_at(&self.stream, self.target, G).unwrap();
            let words = WORD.to_le_bytes().repeat(QUARTER / 4);
            let expected = [vec![FILLED; QUARTER], pattern(3, QUARTER), words, vec![0; QUARTER]].concat();
            // Not assert_eq!, which would print all of them.
            assert!(seen == expected, "a node did something else");
        }
    }
}

fn behind(address: CUdeviceptr, bytes: usize) -> CUdeviceptr {
    address.checked_add(bytes).unwrap()
}

/// Demands that nodes on two buffers work after something was done to these, and that nothing remains of the buffers'
/// old ranges once what comes of them has closed and the executable is destroyed, whichever is first.
fn require_nodes_work(
    backend: &Backend,
    resource: &VirtualMemoryResource,
    change: impl Fn(VirtualMemoryBuffer) -> Option<VirtualMemoryBuffer>,
) {
    for nodes_first in [false, true] {
        let [source, target] = [(); 2].map(|()| resource.allocate(G).unwrap());
        let ranges = [&source, &target].map(Ranges::of);
        let nodes = Nodes::capture(&source, &target);
        nodes.require_work();
        let changed: Vec<_> = [source, target].into_iter().filter_map(&change).collect();
        nodes.require_work();
        if nodes_first {
            drop(nodes);
            await_graphs(resource);
            drop(changed);
        } else {
            drop(changed);
            nodes.require_work();
            drop(nodes);
        }
        await_graphs(resource);
        ranges.iter().for_each(|ranges| backend.require_gone(ranges));
    }
}

fn nodes_work_after_the_buffers_are_closed(backend: &Backend) {
    require_nodes_work(backend, &backend.resource(), |buffer| {
        buffer.close().unwrap();
        None
    });
}

fn nodes_work_after_the_buffers_are_dropped_and_deferred(backend: &Backend) {
    let resource = backend.resource_with(Options::new().on_drop(OnDrop::Defer));
    require_nodes_work(backend, &resource, |buffer| {
        drop(buffer);
        resource.drain(std::time::Instant::now() + Duration::from_secs(30)).unwrap();
        None
    });
}

fn nodes_work_after_the_buffers_are_grown_in_place(backend: &Backend) {
    require_nodes_work(backend, &backend.resource(), |buffer| {
        let grown = buffer.grow_into(2 * G).unwrap();
        assert_eq!(grown.outcome(), Some(Outcome::InPlace));
        Some(grown)
    });
}

/// The new addresses are of the same memory, so that what a node writes at the old ones is seen there.
fn nodes_work_after_the_buffers_are_moved(backend: &Backend) {
    let moved = |buffer: VirtualMemoryBuffer| {
        let (occupied, address) = (occupy_behind(&buffer), buffer.address());
        let moved = buffer.grow_into(ROOM + G).unwrap();
        drop(occupied);
        assert_eq!(moved.outcome(), Some(Outcome::Moved));
        assert_ne!(moved.address(), address);
        Some(moved)
    };
    let resource = backend.resource();
    require_nodes_work(backend, &resource, moved);
    let [source, target] = [(); 2].map(|()| resource.allocate(G).unwrap());
    let (nodes, ranges) = (Nodes::capture(&source, &target), Ranges::of(&target));
    let target = moved(target).unwrap();
    nodes.require_work();
    let mut seen = vec![0; QUARTER];
    target.copy_to_host(0, &mut seen).unwrap();
    assert!(seen == [FILLED; QUARTER], "other memory");
    // The old addresses go with the graph, and the memory stays.
    drop(nodes);
    await_graphs(&resource);
    backend.require_gone(&ranges);
    target.copy_to_host(0, &mut seen).unwrap();
    assert!(seen == [FILLED; QUARTER], "other memory");
}

fn nodes_work_after_the_buffers_are_cut_to_nothing(backend: &Backend) {
    require_nodes_work(backend, &backend.resource(), |buffer| Some(buffer.truncate_into(0).unwrap()));
}

fn a_graph_that_was_made_by_hand_keeps_its_memory(backend: &Backend) {
    let resource = backend.resource();
    let (stream, buffer) = (Stream::non_blocking(&backend.device), resource.allocate(G).unwrap());
    let (address, ranges) = (buffer.address(), Ranges::of(&buffer));
    let graph = Graph::fill(&stream, &buffer, FILLED);
    graph.retain(&buffer).unwrap();
    buffer.close().unwrap();
    let executable = graph.instantiate(&stream);
    executable.launch(&stream);
    assert_eq!(read_at(&stream, behind(address, G - 8), 8).unwrap(), [FILLED; 8]);
    drop((graph, executable));
    await_graphs(&resource);
    backend.require_gone(&ranges);
}

/// A graph that fills a buffer and owns it, of a resource with nothing else.
fn fill_that_owns(backend: &Backend) -> (Graph, StreamRef, VirtualMemoryBuffer) {
    let (stream, buffer) = (Stream::non_blocking(&backend.device), backend.resource().allocate(G).unwrap());
    let graph = Graph::capture(&stream, THREAD_LOCAL, || {
        queue_fill(&stream, &buffer, FILLED);
        retain_in_capture(&buffer, &stream).unwrap();
    });
    (graph, stream, buffer)
}

/// Demands that the memory stays: for a while, since drivers tell late that something is gone.
#[track_caller]
fn require_kept(resource: &VirtualMemoryResource) {
    thread::sleep(Duration::from_millis(20));
    let statistics = resource.statistics();
    assert_eq!((statistics.in_graphs, statistics.pending), (1, 0));
    assert_eq!((statistics.buffers, statistics.mapped.now), (0, G));
}

fn the_memory_goes_with_the_last_executable(backend: &Backend) {
    let (graph, stream, buffer) = fill_that_owns(backend);
    let (resource, ranges) = (buffer.resource().clone(), Ranges::of(&buffer));
    let (first, second) = (graph.instantiate(&stream), graph.instantiate(&stream));
    buffer.close().unwrap();
    drop(graph);
    require_kept(&resource);
    first.launch(&stream);
    stream.synchronize().unwrap();
    drop(first);
    require_kept(&resource);
    second.launch(&stream);
    stream.synchronize().unwrap();
    drop(second);
    await_graphs(&resource);
    backend.require_gone(&ranges);
}

fn an_executable_destroyed_in_flight_keeps_the_memory_until_its_run_is_over(backend: &Backend) {
    let (graph, stream, buffer) = fill_that_owns(backend);
    let (resource, ranges) = (buffer.resource().clone(), Ranges::of(&buffer));
    let executable = graph.instantiate(&stream);
    buffer.set_release(Release::Caller).unwrap();
    let unmapped = backend.watch(Call::cuMemUnmap);
    let gate = Gate::close(&stream);
    executable.launch(&stream);
    drop(executable);
    drop(graph);
    buffer.close().unwrap();
    require_kept(&resource);
    assert!(!is_idle(&stream));
    assert_eq!(unmapped.take_pairs(), []);
    gate.open();
    stream.synchronize().unwrap();
    await_graphs(&resource);
    assert_eq!(unmapped.take_ranges(), ranges.mappings);
    backend.require_gone(&ranges);
}

fn a_graph_that_goes_before_the_buffer_undoes_nothing(backend: &Backend) {
    let (graph, stream, buffer) = fill_that_owns(backend);
    let executable = graph.instantiate(&stream);
    drop(graph);
    executable.launch(&stream);
    stream.synchronize().unwrap();
    let before = backend.ledger.total();
    drop(executable);
    await_graphs(buffer.resource());
    let calls: Vec<Call> = backend.ledger.log_since(before).iter().map(|made| made.call).collect();
    assert_eq!(calls, [Call::cuGraphExecDestroy]);
    let mut seen = vec![0; G];
    buffer.copy_to_host(0, &mut seen).unwrap();
    assert!(seen == [FILLED; G], "what the graph wrote is there");
    buffer.close().unwrap();
}

fn a_graph_may_be_given_the_same_memory_twice(backend: &Backend) {
    let (graph, stream, buffer) = fill_that_owns(backend);
    let (resource, ranges) = (buffer.resource().clone(), Ranges::of(&buffer));
    graph.retain(&buffer).unwrap();
    assert_eq!(resource.statistics().in_graphs, 2);
    let executable = graph.instantiate(&stream);
    buffer.close().unwrap();
    drop(graph);
    executable.launch(&stream);
    stream.synchronize().unwrap();
    drop(executable);
    await_graphs(&resource);
    backend.require_gone(&ranges);
}

fn a_graph_that_was_given_memory_of_many_buffers_gives_all_of_it_back(backend: &Backend) {
    const BUFFERS: usize = 100;
    let resource = backend.resource_with(Options::new().on_drop(OnDrop::Defer));
    let stream = Stream::non_blocking(&backend.device);
    let graph = Graph::capture(&stream, THREAD_LOCAL, || {
        for _ in 0..BUFFERS {
            let buffer = resource.allocate(G).unwrap();
            queue_fill(&stream, &buffer, FILLED);
            retain_in_capture(&buffer, &stream).unwrap();
        }
    });
    assert_eq!(resource.statistics().in_graphs, BUFFERS);
    let executable = graph.instantiate(&stream);
    executable.launch(&stream);
    drop((graph, executable));
    stream.synchronize().unwrap();
    await_graphs(&resource);
    assert_eq!(resource.statistics().mapped.now, 0);
}

fn a_buffer_may_be_dropped_while_the_capture_goes_on(backend: &Backend) {
    let resource = backend.resource();
    let (stream, buffer) = (Stream::non_blocking(&backend.device), resource.allocate(G).unwrap());
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    let (address, ranges) = (buffer.address(), Ranges::of(&buffer));
    let graph = Graph::capture(&stream, CUstreamCaptureMode::GLOBAL, || {
        queue_fill(&stream, &buffer, FILLED);
        retain_in_capture(&buffer, &stream).unwrap();
        drop(buffer);
    });
    let executable = graph.instantiate(&stream);
    executable.launch(&stream);
    assert_eq!(read_at(&stream, address, 8).unwrap(), [FILLED; 8]);
    drop((graph, executable));
    await_graphs(&resource);
    backend.require_gone(&ranges);
}

fn every_capture_outlives_being_given_memory(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let modes = [CUstreamCaptureMode::GLOBAL, THREAD_LOCAL, CUstreamCaptureMode::RELAXED];
    for stream in [Stream::non_blocking(&backend.device), Stream::blocking(&backend.device)] {
        for mode in modes {
            let graph = Graph::capture(&stream, mode, || {
                queue_fill(&stream, &buffer, FILLED);
                retain_in_capture(&buffer, &stream).unwrap();
                thread::scope(|scope| {
                    scope.spawn(|| retain_in_capture(&buffer, &stream).unwrap()).join().unwrap();
                });
            });
            assert_eq!(buffer.resource().statistics().in_graphs, 2);
            drop(graph);
            await_graphs(buffer.resource());
        }
    }
    buffer.close().unwrap();
}

fn a_default_stream_that_captures_is_known_by_its_token(backend: &Backend) {
    let current = Current::push(&backend.device);
    let buffer = backend.resource().allocate(G).unwrap();
    let [_, legacy, per_thread] = Stream::tokens(&backend.driver);
    let graph = Graph::capture(&per_thread, THREAD_LOCAL, || {
        queue_fill(&per_thread, &buffer, FILLED);
        retain_in_capture(&buffer, &per_thread).unwrap();
        // The one never captures, and the other is another thread's there.
        assert_eq!(retain_in_capture(&buffer, &legacy), Err(Error::NotCapturing));
        thread::scope(|scope| {
            let there = || {
                let _current = Current::push(&backend.device);
                retain_in_capture(&buffer, &per_thread)
            };
            assert_eq!(scope.spawn(there).join().unwrap(), Err(Error::NotCapturing));
        });
    });
    assert_eq!(buffer.resource().statistics().in_graphs, 1);
    drop(graph);
    await_graphs(buffer.resource());
    buffer.close().unwrap();
    drop(current);
}

fn a_stream_that_does_not_capture_is_refused(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    let [idle, busy] = [(); 2].map(|()| Stream::non_blocking(&backend.device));
    assert_eq!(retain_in_capture(&buffer, &idle), Err(Error::NotCapturing));
    let gate = Gate::close(&busy);
    assert_eq!(retain_in_capture(&buffer, &busy), Err(Error::NotCapturing));
    assert!(!is_idle(&busy), "it waited");
    gate.open();
    drop(Graph::capture(&idle, THREAD_LOCAL, || queue_fill(&idle, &buffer, 1)));
    assert_eq!(retain_in_capture(&buffer, &idle), Err(Error::NotCapturing));
    assert_eq!(buffer.resource().statistics().in_graphs, 0);
    buffer.close().unwrap();
}
