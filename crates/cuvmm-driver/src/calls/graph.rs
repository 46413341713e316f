//! Graphs, and the user objects that they keep alive.
//!
//! # Safety
//! Outputs are ours and read after success only; that handles are alive, and what a destructor touches, is the
//! callers' promise.
#![allow(unsafe_code)]

use std::ffi::c_void;

use crate::driver::Driver;
use crate::error::Error;
use crate::raw::Call;
use crate::sys::*;

impl Driver {
    /// `cuGraphCreate`: an empty graph.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuGraphCreate")]
    pub fn graph_create(&self) -> Result<CUgraph, Error> {
        let mut graph = CUgraph::NULL;
        // SAFETY: the output is ours.
        let code = unsafe { self.calls()?.cuGraphCreate(&raw mut graph, 0) };
        self.check(Call::cuGraphCreate, code)?;
        Ok(graph)
    }

    /// `cuGraphDestroy`: gives the graph up. What was instantiated from it lives on.
    ///
    /// # Safety
    /// `graph` is the caller's, and nobody uses it any more.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuGraphDestroy")]
    pub unsafe fn graph_destroy(&self, graph: CUgraph) -> Result<(), Error> {
        // SAFETY: the caller owns the graph.
        let code = unsafe { self.calls()?.cuGraphDestroy(graph) };
        self.check(Call::cuGraphDestroy, code)
    }

    /// `cuGraphInstantiateWithFlags`: makes the graph as it is now launchable.
    ///
    /// # Safety
    /// `graph` is alive and of this driver, and nobody changes it meanwhile.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before CUDA 11.4; what the driver answers.
    #[doc(alias = "cuGraphInstantiateWithFlags")]
    pub unsafe fn graph_instantiate(&self, graph: CUgraph) -> Result<CUgraphExec, Error> {
        let mut executable = CUgraphExec::NULL;
        // SAFETY: the output is ours; the caller vouches for the graph.
        let code = unsafe { self.calls()?.cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) };
        self.check(Call::cuGraphInstantiateWithFlags, code)?;
        Ok(executable)
    }

    /// `cuGraphLaunch`: queues one run of the graph.
    ///
    /// # Safety
    /// `executable` and `stream` are alive and of this driver, and all that the graph touches is valid until the
    /// run is done.
    ///
    /// # Errors
    /// What the driver answers. A run over memory that is gone fails later.
    #[doc(alias = "cuGraphLaunch")]
    pub unsafe fn graph_launch(&self, executable: CUgraphExec, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the caller vouches for both, and for what the graph does.
        let code = unsafe { self.calls()?.cuGraphLaunch(executable, stream) };
        self.check(Call::cuGraphLaunch, code)
    }

    /// `cuGraphExecDestroy`: gives the executable up, at once or when its runs are done.
    ///
    /// # Safety
    /// `executable` is the caller's, and nobody uses it any more.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuGraphExecDestroy")]
    pub unsafe fn graph_exec_destroy(&self, executable: CUgraphExec) -> Result<(), Error> {
        // SAFETY: the caller owns the executable.
        let code = unsafe { self.calls()?.cuGraphExecDestroy(executable) };
        self.check(Call::cuGraphExecDestroy, code)
    }

    /// `cuUserObjectCreate`: counts references to something of the caller's: `destroy(user_data)` runs on a
    /// thread of the driver's after the last one is gone. The caller has the first `references`.
    ///
    /// # Safety
    /// `destroy` may be called with `user_data` once, on any thread, at any time until the last reference is
    /// gone and for a while after; it makes no CUDA call and doesn't unwind.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before CUDA 11.3; 1 without a function or for no references.
    #[doc(alias = "cuUserObjectCreate")]
    pub unsafe fn user_object_create(
        &self,
        user_data: *mut c_void,
        destroy: CUhostFn,
        references: u32,
    ) -> Result<CUuserObject, Error> {
        let mut object = CUuserObject::NULL;
        let flags = CUuserObject_flags::NO_DESTRUCTOR_SYNC.0;
        // SAFETY: the output is ours; the caller vouches for the destructor.
        let code = unsafe { self.calls()?.cuUserObjectCreate(&raw mut object, user_data, destroy, references, flags) };
        self.check(Call::cuUserObjectCreate, code)?;
        Ok(object)
    }

    /// `cuUserObjectRetain`: `count` more references.
    ///
    /// # Safety
    /// The caller has a reference to `object`, of this driver.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before CUDA 11.3; 1 for no references.
    #[doc(alias = "cuUserObjectRetain")]
    pub unsafe fn user_object_retain(&self, object: CUuserObject, count: u32) -> Result<(), Error> {
        // SAFETY: the caller holds a reference.
        let code = unsafe { self.calls()?.cuUserObjectRetain(object, count) };
        self.check(Call::cuUserObjectRetain, code)
    }

    /// `cuUserObjectRelease`: gives `count` references back.
    ///
    /// # Safety
    /// The caller has as many references to `object`, of this driver.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before CUDA 11.3; 1 for no references.
    #[doc(alias = "cuUserObjectRelease")]
    pub unsafe fn user_object_release(&self, object: CUuserObject, count: u32) -> Result<(), Error> {
        // SAFETY: the caller owns the references.
        let code = unsafe { self.calls()?.cuUserObjectRelease(object, count) };
        self.check(Call::cuUserObjectRelease, code)
    }

    /// `cuGraphRetainUserObject`: gives the graph `count` references of its own, which it and all made from it
    /// keep until they are destroyed.
    ///
    /// # Safety
    /// `graph` is alive, the caller has a reference to `object`, and both are of this driver.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before CUDA 11.3; 1 for no references.
    #[doc(alias = "cuGraphRetainUserObject")]
    pub unsafe fn graph_retain_user_object(
        &self,
        graph: CUgraph,
        object: CUuserObject,
        count: u32,
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for both.
        let code = unsafe { self.calls()?.cuGraphRetainUserObject(graph, object, count, 0) };
        self.check(Call::cuGraphRetainUserObject, code)
    }

    /// `cuGraphRetainUserObject`, moving: `count` references of the caller's become the graph's.
    ///
    /// # Safety
    /// `graph` is alive, the caller has as many references to `object` and uses them no more, and both are of
    /// this driver.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before CUDA 11.3; 1 for no references. The references then are still the caller's.
    #[doc(alias = "cuGraphRetainUserObject")]
    pub unsafe fn graph_move_user_object(&self, graph: CUgraph, object: CUuserObject, count: u32) -> Result<(), Error> {
        let flags = CUuserObjectRetain_flags::MOVE.0;
        // SAFETY: the caller vouches for the graph and owns the references.
        let code = unsafe { self.calls()?.cuGraphRetainUserObject(graph, object, count, flags) };
        self.check(Call::cuGraphRetainUserObject, code)
    }

    /// `cuGraphReleaseUserObject`: takes `count` references from the graph.
    ///
    /// # Safety
    /// `graph` is alive and has as many references to `object`, which were given to it by the caller.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before CUDA 11.3; 1 where it has not so many.
    #[doc(alias = "cuGraphReleaseUserObject")]
    pub unsafe fn graph_release_user_object(
        &self,
        graph: CUgraph,
        object: CUuserObject,
        count: u32,
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for both.
        let code = unsafe { self.calls()?.cuGraphReleaseUserObject(graph, object, count) };
        self.check(Call::cuGraphReleaseUserObject, code)
    }
}
