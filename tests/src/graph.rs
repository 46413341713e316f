//! Graphs: captured or made by hand, launched, and given memory.
//!
//! # Safety
//! Graphs and executables are a test's own, on one thread at a time, and destroyed once. That what their nodes name is there
//! when they run is what the tests are about.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::time::{Duration, Instant};

use cuvmm::driver::sys::{
    CUDA_MEMSET_NODE_PARAMS, CUdeviceptr, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUmodule, CUstreamCaptureMode,
};
use cuvmm::{Driver, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_resource::Error;
use cuvmm_sim::kernels;

use crate::work::in_context_of;

/// How long a driver may take to tell that a graph is gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// A graph.
pub struct Graph {
    driver: Driver,
    graph: CUgraph,
}

impl Graph {
    /// What `record` queues on the stream, which captures that.
    pub fn capture(stream: &StreamRef, mode: CUstreamCaptureMode, record: impl FnOnce()) -> Self {
        in_context_of(stream, || {
            let driver = stream.driver().clone();
            // SAFETY: the stream is alive.
            unsafe { driver.stream_begin_capture(stream.as_raw(), mode) }.expect("a capture");
            record();
            // SAFETY: as above.
            let graph = unsafe { driver.stream_end_capture(stream.as_raw()) }.expect("a capture that lived");
            Self { driver, graph }
        })
    }

    /// One without nodes.
    pub fn empty(driver: &Driver) -> Self {
        Self { driver: driver.clone(), graph: driver.graph_create().expect("a graph") }
    }

    /// One node, made by hand, that fills the whole of a buffer. The stream's context is the node's.
    pub fn fill(stream: &StreamRef, buffer: &VirtualMemoryBuffer, value: u8) -> Self {
        let driver = stream.driver().clone();
        let graph = driver.graph_create().expect("a graph");
        let parameters = CUDA_MEMSET_NODE_PARAMS {
            dst: buffer.address(),
            pitch: 0,
            value: value.into(),
            element_size: 1,
            width: buffer.size(),
            height: 1,
        };
        let mut node = CUgraphNode(std::ptr::null_mut());
        // SAFETY: the stream is alive.
        let context = unsafe { driver.stream_get_ctx(stream.as_raw()) }.expect("a context");
        // SAFETY: the graph is alive, the output and the parameters are ours, and the node depends on none.
        let code = unsafe {
            driver.raw().cuGraphAddMemsetNode(&raw mut node, graph, std::ptr::null(), 0, &raw const parameters, context)
        };
        assert!(code.is_success(), "a node: {code:?}");
        Self { driver, graph }
    }

    /// Makes it an owner of the buffer's memory.
    pub fn retain(&self, buffer: &VirtualMemoryBuffer) -> Result<(), Error> {
        // SAFETY: the graph is alive, and nobody else uses it.
        unsafe { buffer.retain_in_graph(self.graph) }
    }

    /// What can be launched of it, in the context of that stream.
    pub fn instantiate(&self, stream: &StreamRef) -> Executable {
        // SAFETY: the graph is alive, and nobody changes it.
        let executable = in_context_of(stream, || unsafe { self.driver.graph_instantiate(self.graph) });
        Executable { driver: self.driver.clone(), executable: executable.expect("an executable") }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: it is this value's.
        unsafe { self.driver.graph_destroy(self.graph) }.expect("a graph to destroy");
    }
}

/// Makes the graph that a stream captures into an owner of the buffer's memory.
pub fn retain_in_capture(buffer: &VirtualMemoryBuffer, stream: &StreamRef) -> Result<(), Error> {
    // SAFETY: a test ends its captures later, and uses them on one thread at a time.
    unsafe { buffer.retain_in_capture(stream) }
}

/// A graph that can be launched.
pub struct Executable {
    driver: Driver,
    executable: CUgraphExec,
}

impl Executable {
    /// Queues a run.
    pub fn launch(&self, stream: &StreamRef) {
        in_context_of(stream, || {
            // SAFETY: both are alive; what the run uses is what the tests are about.
            unsafe { self.driver.graph_launch(self.executable, stream.as_raw()) }.expect("a launch");
        });
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: it is this value's.
        unsafe { self.driver.graph_exec_destroy(self.executable) }.expect("an executable to destroy");
    }
}

/// The test kernels, in the context of a stream.
pub struct Kernels {
    stream: StreamRef,
    module: CUmodule,
    fill: CUfunction,
}

impl Kernels {
    /// Loads them, and runs one for nothing: drivers load a kernel when it is first launched, which is to be in no capture.
    pub fn load(stream: &StreamRef) -> Self {
        let driver = stream.driver();
        // SAFETY: the text is a module's.
        let module = in_context_of(stream, || unsafe { driver.module_load_data(kernels::PTX) }).expect("a module");
        // SAFETY: the module was loaded just now.
        let fill = unsafe { driver.module_get_function(module, kernels::FILL) }.expect("a kernel");
        let kernels = Self { stream: stream.clone(), module, fill };
        kernels.fill(stream, CUdeviceptr(0), 0, 0);
        stream.synchronize().expect("a kernel that does nothing");
        kernels
    }

    /// Queues a kernel that writes `value` to each of so many words at an address.
    pub fn fill(&self, stream: &StreamRef, mut address: CUdeviceptr, mut value: u32, words: usize) {
        let mut words = words as u64;
        let mut parameters: [*mut c_void; 3] =
            [(&raw mut address).cast(), (&raw mut value).cast(), (&raw mut words).cast()];
        in_context_of(stream, || {
            // SAFETY: the function has these parameters, and its module is loaded.
            unsafe {
                stream.driver().launch_kernel(self.fill, [8, 1, 1], [256, 1, 1], 0, stream.as_raw(), &mut parameters)
            }
            .expect("a kernel to launch");
        });
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: it was loaded by this value, and a test waits for what it launched.
        in_context_of(&self.stream, || unsafe { self.stream.driver().module_unload(self.module) })
            .expect("a module to unload");
    }
}

/// Queues a copy between two addresses of devices.
pub fn queue_copy(stream: &StreamRef, from: CUdeviceptr, to: CUdeviceptr, bytes: usize) {
    in_context_of(stream, || {
        // SAFETY: whoever has memory there keeps it until the copy is done.
        unsafe { stream.driver().memcpy_dtod_async(to, from, bytes, stream.as_raw()) }.expect("a copy to queue");
    });
}

/// Waits until no graph has anything of the resource's memory, and all that graphs and buffers left is given back.
#[track_caller]
pub fn await_graphs(resource: &VirtualMemoryResource) {
    await_graphs_but(resource, 0);
}

/// As [`await_graphs`], but for so many shares, which are lost.
#[track_caller]
pub(crate) fn await_graphs_but(resource: &VirtualMemoryResource, lost: usize) {
    let deadline = Instant::now() + PATIENCE;
    while resource.statistics().in_graphs > lost {
        assert!(Instant::now() < deadline, "graphs have {} shares", resource.statistics().in_graphs);
        std::thread::sleep(Duration::from_millis(1));
    }
    resource.drain(deadline).expect("nothing left to wait for");
}
