//! Graphs made by hand: rules R101 and R102, and what a capture says of itself.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use cuvmm_driver::sys::*;

use crate::calls::Called;
use crate::common::{Gpu, UNIT, grant, read_write};

const NON_BLOCKING: CUstream_flags = CUstream_flags::NON_BLOCKING;

fn set(to: u64, value: u32, width: usize) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS { dst: CUdeviceptr(to), pitch: 0, value, element_size: 4, width, height: 1 }
}

fn copy(to: u64, from: u64, bytes: usize) -> CUDA_MEMCPY3D {
    CUDA_MEMCPY3D::linear(CUdeviceptr(to), CUdeviceptr(from), bytes)
}

#[test]
fn nodes_run_after_what_they_depend_on() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (graph, buffer, stream) = (gpu.graph(), gpu.buffer(UNIT), gpu.stream(NON_BLOCKING));
        let (from, to) = (buffer.address, buffer.address + 64);
        let first = gpu.memset(graph, &[], set(from, 1, 16)).unwrap();
        let copied = gpu.memcpy(graph, &[first], copy(to, from, 64)).unwrap();
        let second = gpu.memset(graph, &[copied], set(from, 2, 16)).unwrap();
        assert!(gpu.memcpy(graph, &[second, copied], copy(to + 32, from, 32)).is_ok());
        assert_eq!(gpu.run_graph(graph, stream), 0);
        let words = [from, to, to + 28, to + 32, to + 60].map(|address| gpu.word(address));
        assert_eq!(words, [2, 1, 1, 2, 2]);
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn host_nodes_run_in_their_place() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (graph, stream) = (gpu.graph(), gpu.stream(NON_BLOCKING));
        let called: [Called; 3] = [1, 2, 3].map(|number| Arc::new((Mutex::default(), number)));
        let first = gpu.host_node(graph, &[], called[0].clone()).unwrap();
        let second = gpu.host_node(graph, &[first], called[0].clone()).unwrap();
        assert!(gpu.host_node(graph, &[first, second], called[2].clone()).is_ok());
        assert_eq!(gpu.run_graph(graph, stream), 0);
        assert_eq!(gpu.run_graph(graph, stream), 0);
        let seen = called.map(|called| called.0.lock().unwrap().len());
        assert_eq!(seen, [4, 0, 2]);
        let none = CUDA_HOST_NODE_PARAMS { host_fn: None, user_data: std::ptr::null_mut() };
        // SAFETY: the parameters are a local.
        let refused =
            gpu.added(|raw, node| unsafe { raw.cuGraphAddHostNode(node, graph, std::ptr::null(), 0, &raw const none) });
        assert_eq!(refused, Err(1));
    }
}

#[test]
fn dependencies_are_nodes_of_the_same_graph_each_once() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (graph, other, buffer) = (gpu.graph(), gpu.graph(), gpu.buffer(UNIT));
        let node = gpu.memset(graph, &[], set(buffer.address, 1, 1)).unwrap();
        let add = |graph, after: &[CUgraphNode]| gpu.memset(graph, after, set(buffer.address, 1, 1)).err();
        assert_eq!(add(other, &[node]), Some(1), "another graph's");
        assert_eq!(add(graph, &[node, node]), Some(1), "twice");
        assert_eq!(add(graph, &[CUgraphNode::NULL]), Some(1));
        let parameters = set(buffer.address, 1, 1);
        let context = gpu.current_context();
        // SAFETY: null is what is asked about.
        let code = unsafe {
            let mut node = CUgraphNode::NULL;
            gpu.raw().cuGraphAddMemsetNode(&raw mut node, graph, std::ptr::null(), 1, &raw const parameters, context)
        };
        assert_eq!(code.0, 1, "none there");
        assert_eq!(gpu.violations(), [""; 0]);
        assert_eq!(gpu.graph_destroy(other), 0);
        assert_eq!(add(other, &[]), Some(1));
        assert_eq!(gpu.violations().len(), 1);
    }
}

#[test]
fn a_memset_node_sets_one_row_of_whole_elements() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (graph, buffer, stream) = (gpu.graph(), gpu.buffer(UNIT), gpu.stream(NON_BLOCKING));
        let good = set(buffer.address, 0x0403_0201, 2);
        for (size, expected) in [(1, [1, 1, 0xA5, 0xA5, 0xA5]), (2, [1, 2, 1, 2, 0xA5]), (4, [1, 2, 3, 4, 1])] {
            assert!(gpu.memset(graph, &[], CUDA_MEMSET_NODE_PARAMS { element_size: size, ..good }).is_ok());
            assert_eq!(gpu.run_graph(graph, stream), 0);
            assert_eq!(gpu.simulator.peek(CUdeviceptr(buffer.address), 5).unwrap(), expected);
        }
        let table = [
            (CUDA_MEMSET_NODE_PARAMS { element_size: 0, ..good }, 1),
            (CUDA_MEMSET_NODE_PARAMS { element_size: 3, ..good }, 1),
            (CUDA_MEMSET_NODE_PARAMS { element_size: 8, ..good }, 1),
            (CUDA_MEMSET_NODE_PARAMS { width: 0, ..good }, 1),
            (CUDA_MEMSET_NODE_PARAMS { height: 0, ..good }, 1),
            (CUDA_MEMSET_NODE_PARAMS { height: 2, pitch: 64, ..good }, 801),
            (CUDA_MEMSET_NODE_PARAMS { dst: CUdeviceptr(buffer.address + 2), ..good }, 1),
            (CUDA_MEMSET_NODE_PARAMS { dst: CUdeviceptr(0), ..good }, 1),
            (CUDA_MEMSET_NODE_PARAMS { width: UNIT, ..good }, 1),
        ];
        for (parameters, code) in table {
            assert_eq!(gpu.memset(graph, &[], parameters), Err(code), "{parameters:?}");
        }
        assert_eq!(gpu.grant(buffer.address, UNIT, &[grant(CUmemLocation::device(0), 1)]), 0);
        assert_eq!(gpu.memset(graph, &[], good), Err(1), "it may only be read");
    }
}

#[test]
fn a_memcpy_node_is_linear() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (graph, buffer) = (gpu.graph(), gpu.buffer(UNIT));
        let good = copy(buffer.address, buffer.address + 64, 64);
        let somewhere = std::ptr::without_provenance_mut(8);
        let table = [
            (CUDA_MEMCPY3D { height: 2, ..good }, 801),
            (CUDA_MEMCPY3D { depth: 2, ..good }, 801),
            (CUDA_MEMCPY3D { src_y: 1, ..good }, 801),
            (CUDA_MEMCPY3D { dst_x_in_bytes: 1, ..good }, 801),
            (CUDA_MEMCPY3D { dst_lod: 1, ..good }, 801),
            (CUDA_MEMCPY3D { src_memory_type: CUmemorytype::ARRAY, ..good }, 801),
            (CUDA_MEMCPY3D { src_memory_type: CUmemorytype(0), ..good }, 1),
            (CUDA_MEMCPY3D { dst_memory_type: CUmemorytype(5), ..good }, 1),
            (CUDA_MEMCPY3D { reserved0: somewhere, ..good }, 1),
            (CUDA_MEMCPY3D { reserved1: somewhere, ..good }, 1),
            (CUDA_MEMCPY3D { width_in_bytes: 0, ..good }, 1),
            (CUDA_MEMCPY3D { height: 0, ..good }, 1),
            (CUDA_MEMCPY3D { depth: 0, ..good }, 1),
            (CUDA_MEMCPY3D { width_in_bytes: 2 * UNIT, ..good }, 1),
            (CUDA_MEMCPY3D { src_device: CUdeviceptr(0), ..good }, 1),
            (CUDA_MEMCPY3D { src_memory_type: CUmemorytype::HOST, ..good }, 1),
        ];
        for (index, (parameters, code)) in table.into_iter().enumerate() {
            assert_eq!(gpu.memcpy(graph, &[], parameters), Err(code), "row {index}");
        }
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn a_memcpy_node_reads_and_writes_the_host_when_it_runs() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (graph, buffer, stream) = (gpu.graph(), gpu.buffer(UNIT), gpu.stream(NON_BLOCKING));
        let (mut source, mut target) = ([1_u8; 16], [0_u8; 16]);
        let (from, to) = ((&raw mut source).cast::<c_void>(), (&raw mut target).cast::<c_void>());
        let host = CUmemorytype::HOST;
        let up = CUDA_MEMCPY3D { src_memory_type: host, src_host: from, ..copy(buffer.address, 0, 16) };
        let down = CUDA_MEMCPY3D { dst_memory_type: host, dst_host: to, ..copy(0, buffer.address, 16) };
        let first = gpu.memcpy(graph, &[], up).unwrap();
        assert!(gpu.memcpy(graph, &[first], down).is_ok());
        let executable = gpu.instantiate(graph);
        for value in [3, 4] {
            // SAFETY: nothing runs that reads or writes it.
            unsafe { from.cast::<u8>().write_bytes(value, 16) };
            assert_eq!([gpu.launch(executable, stream), gpu.synchronize(stream)], [0, 0]);
            // SAFETY: as above.
            assert_eq!(unsafe { to.cast::<[u8; 16]>().read() }, [value; 16]);
        }
        let unified = CUmemorytype::UNIFIED;
        let there = CUDA_MEMCPY3D { src_memory_type: unified, ..copy(buffer.address + 16, buffer.address, 16) };
        assert!(gpu.memcpy(graph, &[], there).is_ok());
        assert_eq!(gpu.run_graph(graph, stream), 0);
        assert_eq!(gpu.word(buffer.address + 16), 0x0404_0404);
    }
}

#[test]
fn a_set_needs_a_living_context_and_a_copy_none() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (graph, buffer) = (gpu.graph(), gpu.buffer(UNIT));
        assert_eq!(gpu.set_current(CUcontext::NULL), 0);
        assert_eq!(gpu.memset(graph, &[], set(buffer.address, 1, 1)), Err(1));
        assert!(gpu.memcpy(graph, &[], copy(buffer.address, buffer.address + 64, 4)).is_ok());
    }
}

#[test]
fn launches_of_one_executable_follow_each_other() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (graph, buffer) = (gpu.graph(), gpu.buffer(UNIT));
        let (stream, other) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        assert!(gpu.memset(graph, &[], set(buffer.address, 1, 1)).is_ok());
        let executable = gpu.instantiate(graph);
        let gate = gpu.hold(stream);
        assert_eq!([gpu.launch(executable, stream), gpu.launch(executable, other)], [0, 0]);
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert_eq!(gpu.query(other), 600, "its launch waits for the first");
        gate.open();
        assert_eq!(gpu.synchronize(other), 0);
        assert_eq!(gpu.word(buffer.address), 1);
    }
}

#[test]
fn a_graph_uses_what_is_mapped_and_granted_when_it_runs() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (graph, buffer, stream) = (gpu.graph(), gpu.buffer(UNIT), gpu.stream(NON_BLOCKING));
        assert!(gpu.memset(graph, &[], set(buffer.address, 7, 1)).is_ok());
        let executable = gpu.instantiate(graph);
        assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
        assert_eq!(gpu.map(buffer.address, UNIT, gpu.create(UNIT).unwrap()), 0);
        assert_eq!(gpu.grant(buffer.address, UNIT, &[read_write(0)]), 0);
        assert_eq!([gpu.launch(executable, stream), gpu.synchronize(stream)], [0, 0]);
        assert_eq!(gpu.word(buffer.address), 7);
        assert_eq!(gpu.grant(buffer.address, UNIT, &[grant(CUmemLocation::device(0), 1)]), 0);
        assert_eq!([gpu.launch(executable, stream), gpu.synchronize(stream)], [0, 719]);
    }
}

#[test]
fn a_capture_names_what_comes_before() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (stream, fork) = (gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING));
        let (buffer, start, stop) = (gpu.buffer(UNIT), gpu.event(), gpu.event());
        assert_eq!(gpu.capture_info(stream), (0, CUgraph::NULL, vec![]));
        assert_eq!(gpu.begin(stream, CUstreamCaptureMode::GLOBAL), 0);
        assert_eq!(gpu.capture_info(stream).2, [], "there are none yet");
        assert_eq!(gpu.fill(buffer.address, 1, 1, stream), 0);
        let first = gpu.capture_info(stream).2;
        assert_eq!(first.len(), 1);
        assert_eq!([gpu.record(start, stream), gpu.wait_event(fork, start)], [0, 0]);
        assert_eq!(gpu.capture_info(fork).2, first, "what the event was recorded after");
        assert_eq!([gpu.fill(buffer.address, 1, 1, stream), gpu.fill(buffer.address, 1, 1, fork)], [0, 0]);
        assert_eq!([gpu.record(stop, fork), gpu.wait_event(stream, stop)], [0, 0]);
        let (status, graph, both) = gpu.capture_info(stream);
        assert_eq!((status, both.len()), (1, 2));
        assert!(!both.contains(&first[0]));
        assert_eq!(gpu.end(stream), Ok(graph));
        assert_eq!(gpu.memset(graph, &both, set(buffer.address, 1, 1)).err(), None, "they are nodes of the graph");
    }
}

#[test]
fn a_capture_can_be_added_to_by_hand() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (stream, buffer) = (gpu.stream(NON_BLOCKING), gpu.buffer(UNIT));
        assert_eq!(gpu.begin(stream, CUstreamCaptureMode::GLOBAL), 0);
        assert_eq!(gpu.fill(buffer.address, 1, 4, stream), 0);
        let (_, graph, nodes) = gpu.capture_info(stream);
        assert!(gpu.memset(graph, &nodes, set(buffer.address, 2, 1)).is_ok());
        // SAFETY: numbers; the graph is its capture's as yet.
        let early = unsafe {
            let mut executable = CUgraphExec::NULL;
            [gpu.raw().cuGraphDestroy(graph), gpu.raw().cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)]
        };
        assert_eq!(early.map(|code| code.0), [1, 1]);
        assert_eq!(gpu.violations().len(), 2);
        assert_eq!(gpu.end(stream), Ok(graph));
        assert_eq!(gpu.run_graph(graph, stream), 0);
        assert_eq!(gpu.word(buffer.address), 2);
    }
}
