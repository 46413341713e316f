//! The calls on kernels, graphs and user objects, with plain numbers for arguments and results.
//!
//! # Safety
//! Every pointer passed is a local's, or of a slice with its length, or leads to what the test keeps until the driver
//! let go of it. Numbers are passed as the tests have them: the simulator looks all of them up.

#![allow(unsafe_code, clippy::undocumented_unsafe_blocks, reason = "as the header says of all")]

use std::ffi::{CStr, c_void};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, RawDriver};
use cuvmm_sim::kernels;

use crate::common::{Gpu, ok};

impl Gpu {
    pub(crate) fn load(&self, text: &CStr) -> Result<CUmodule, u32> {
        let mut module = CUmodule::NULL;
        let code = unsafe { self.raw().cuModuleLoadData(&raw mut module, text.as_ptr().cast()) };
        ok(code, module)
    }

    pub(crate) fn function(&self, module: CUmodule, name: &CStr) -> Result<CUfunction, u32> {
        let mut function = CUfunction::NULL;
        let code = unsafe { self.raw().cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
        ok(code, function)
    }

    /// A function of a module that stays loaded.
    pub(crate) fn kernel(&self, name: &CStr) -> CUfunction {
        self.function(self.load(kernels::PTX).unwrap(), name).unwrap()
    }

    pub(crate) fn unload(&self, module: CUmodule) -> u32 {
        unsafe { self.raw().cuModuleUnload(module) }.0
    }

    /// Launches a function on a grid of blocks.
    pub(crate) fn launch_on(
        &self,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        function: CUfunction,
        stream: CUstream,
        values: &[u64],
    ) -> u32 {
        let mut values = values.to_vec();
        let mut parameters: Vec<*mut c_void> = values.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let ([gx, gy, gz], [bx, by, bz], none) = (grid, block, std::ptr::null_mut());
        let parameters = parameters.as_mut_ptr();
        let raw = self.raw();
        unsafe { raw.cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, none) }.0
    }

    pub(crate) fn run(&self, function: CUfunction, stream: CUstream, values: &[u64]) -> u32 {
        self.launch_on([2, 1, 1], [32, 1, 1], 0, function, stream, values)
    }

    /// The 32-bit word there, whoever may see it.
    pub(crate) fn word(&self, address: u64) -> u32 {
        let bytes = self.simulator.peek(CUdeviceptr(address), 4).unwrap();
        u32::from_ne_bytes(bytes.try_into().unwrap())
    }

    /// Waits until a spinning kernel changed its word.
    pub(crate) fn await_spin(&self, address: u64) {
        let (before, until) = (self.word(address), Instant::now() + Duration::from_secs(20));
        while self.word(address) == before {
            assert!(Instant::now() < until, "nothing spins");
            std::thread::yield_now();
        }
    }
}

impl Gpu {
    /// A user object whose destructor does that.
    pub(crate) fn object_doing(
        &self,
        references: u32,
        work: impl FnOnce() + Send + 'static,
    ) -> (CUuserObject, Receiver<ThreadId>) {
        let (fired, seen) = channel();
        let data = Box::into_raw(Box::new(Fuse { work: Box::new(work), fired })).cast();
        let mut object = CUuserObject::NULL;
        let code = unsafe { self.raw().cuUserObjectCreate(&raw mut object, data, Some(fire), references, 1) };
        assert_eq!(code.0, 0);
        (object, seen)
    }

    pub(crate) fn object(&self, references: u32) -> (CUuserObject, Receiver<ThreadId>) {
        self.object_doing(references, || {})
    }

    pub(crate) fn object_retain(&self, object: CUuserObject, count: u32) -> u32 {
        unsafe { self.raw().cuUserObjectRetain(object, count) }.0
    }

    pub(crate) fn object_release(&self, object: CUuserObject, count: u32) -> u32 {
        unsafe { self.raw().cuUserObjectRelease(object, count) }.0
    }

    pub(crate) fn graph_retain(&self, graph: CUgraph, object: CUuserObject, count: u32, flags: u32) -> u32 {
        unsafe { self.raw().cuGraphRetainUserObject(graph, object, count, flags) }.0
    }

    pub(crate) fn graph_release(&self, graph: CUgraph, object: CUuserObject, count: u32) -> u32 {
        unsafe { self.raw().cuGraphReleaseUserObject(graph, object, count) }.0
    }

    pub(crate) fn graph(&self) -> CUgraph {
        let mut graph = CUgraph::NULL;
        assert_eq!(unsafe { self.raw().cuGraphCreate(&raw mut graph, 0) }.0, 0);
        graph
    }

    pub(crate) fn graph_destroy(&self, graph: CUgraph) -> u32 {
        unsafe { self.raw().cuGraphDestroy(graph) }.0
    }

    pub(crate) fn executable_destroy(&self, executable: CUgraphExec) -> u32 {
        unsafe { self.raw().cuGraphExecDestroy(executable) }.0
    }
}

impl Gpu {
    pub(crate) fn memset(
        &self,
        graph: CUgraph,
        after: &[CUgraphNode],
        parameters: CUDA_MEMSET_NODE_PARAMS,
    ) -> Result<CUgraphNode, u32> {
        let (count, context) = (after.len(), self.current_context());
        self.added(|raw, node| unsafe {
            raw.cuGraphAddMemsetNode(node, graph, after.as_ptr(), count, &raw const parameters, context)
        })
    }

    pub(crate) fn memcpy(
        &self,
        graph: CUgraph,
        after: &[CUgraphNode],
        parameters: CUDA_MEMCPY3D,
    ) -> Result<CUgraphNode, u32> {
        let (count, context) = (after.len(), self.current_context());
        self.added(|raw, node| unsafe {
            raw.cuGraphAddMemcpyNode(node, graph, after.as_ptr(), count, &raw const parameters, context)
        })
    }

    pub(crate) fn host_node(&self, graph: CUgraph, after: &[CUgraphNode], called: Called) -> Result<CUgraphNode, u32> {
        let user_data = Arc::into_raw(called).cast_mut().cast();
        let parameters = CUDA_HOST_NODE_PARAMS { host_fn: Some(note_call), user_data };
        let count = after.len();
        self.added(|raw, node| unsafe {
            raw.cuGraphAddHostNode(node, graph, after.as_ptr(), count, &raw const parameters)
        })
    }

    pub(crate) fn added(
        &self,
        add: impl FnOnce(&dyn RawDriver, *mut CUgraphNode) -> CUresult,
    ) -> Result<CUgraphNode, u32> {
        let mut node = CUgraphNode::NULL;
        let code = add(self.raw(), &raw mut node);
        assert_eq!(node.is_null(), !code.is_success());
        ok(code, node)
    }

    pub(crate) fn current_context(&self) -> CUcontext {
        let mut context = CUcontext::NULL;
        assert_eq!(unsafe { self.raw().cuCtxGetCurrent(&raw mut context) }.0, 0);
        context
    }

    /// Launches a graph once, and waits for it.
    pub(crate) fn run_graph(&self, graph: CUgraph, stream: CUstream) -> u32 {
        let executable = self.instantiate(graph);
        assert_eq!(self.launch(executable, stream), 0);
        let code = self.synchronize(stream);
        assert_eq!(self.executable_destroy(executable), 0);
        code
    }

    /// What a capture says: status, graph and the nodes that the next one comes after.
    pub(crate) fn capture_info(&self, stream: CUstream) -> (u32, CUgraph, Vec<CUgraphNode>) {
        let (mut status, mut id, mut graph) = (CUstreamCaptureStatus(77), 0, CUgraph::NULL);
        let (mut nodes, mut count) = (std::ptr::dangling(), 77);
        let code = unsafe {
            self.raw().cuStreamGetCaptureInfo(
                stream,
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                &raw mut nodes,
                &raw mut count,
            )
        };
        assert_eq!(code.0, 0);
        let nodes = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(nodes, count) } };
        (status.0, graph, nodes.to_vec())
    }

    pub(crate) fn captured_graph(&self, stream: CUstream) -> CUgraph {
        self.capture_info(stream).1
    }
}

/// What a destructor does, and where it says that it did.
struct Fuse {
    work: Box<dyn FnOnce() + Send>,
    fired: Sender<ThreadId>,
}

pub(crate) unsafe extern "C" fn fire(data: *mut c_void) {
    let fuse = unsafe { Box::from_raw(data.cast::<Fuse>()) };
    (fuse.work)();
    // Whoever wanted to know may be gone.
    let _ = fuse.fired.send(std::thread::current().id());
}

/// What a host node writes down.
pub(crate) type Called = Arc<(Mutex<Vec<u32>>, u32)>;

unsafe extern "C" fn note_call(data: *mut c_void) {
    // The node lives as long as the test, and so does what it was given.
    let called = unsafe { &*data.cast::<(Mutex<Vec<u32>>, u32)>() };
    called.0.lock().unwrap().push(called.1);
}
