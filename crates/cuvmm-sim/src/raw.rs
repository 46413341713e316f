//! The calls, one row each: what C passes, and who does the work.
//!
//! # Safety
//! Every pointer argument is wrapped once, by the promise that the caller makes to every method of the trait.
//! Success is answered only after the effect took place and every output was written.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, Call, RawDriver};

use crate::copy::Side;
use crate::module::Shape;
use crate::pointer::Value;
use crate::session::{Answer, In, Out, Session};
use crate::simulator::Simulator;
use crate::work::HostCall;
use crate::{
    access, capture, codes, context, copy, create, device, event, graph, map, module, pointer, reserve, share, stream,
    user_object,
};

/// The C type of an argument, by how the call uses it.
macro_rules! argument {
    (val $ty:ty) => { $ty };
    (out $ty:ty) => { *mut $ty };
    (inp $ty:ty) => { *const $ty };
    (list $ty:ty) => { *mut $ty };
}

macro_rules! wrap {
    (val $arg:ident) => {};
    (out $arg:ident) => {
        // SAFETY: the trait's caller promises that it is null or valid for what the call writes.
        let $arg = unsafe { Out::new($arg) };
    };
    (inp $arg:ident) => {
        // SAFETY: the trait's caller promises that it is null or valid for what the call reads.
        let $arg = unsafe { In::new($arg) };
    };
    (list $arg:ident) => {
        // SAFETY: the trait's caller promises that it is null or valid for what the call reads.
        let $arg = unsafe { In::new($arg.cast_const()) };
    };
}

macro_rules! calls {
    ($($name:ident($($kind:ident $arg:ident: $ty:ty),*) |$session:ident| $work:expr;)*) => {
        // SAFETY: reserved addresses are mapped, so nobody else's; outputs are written before success is answered;
        // an effect takes place under the lock, as the manual says of the call.
        unsafe impl RawDriver for Simulator {
            fn provides(&self, call: Call) -> bool {
                self.has(call) && (call != Call::cuGetProcAddress || self.is_served())
            }

            unsafe fn cuGetProcAddress(
                &self, symbol: *const c_char, pfn: *mut *mut c_void, version: i32, flags: u64,
                status: *mut CUdriverProcAddressQueryResult,
            ) -> CUresult {
                // SAFETY: the trait's caller promises that it is null or a C string.
                let symbol = unsafe { In::new(symbol) };
                // SAFETY: the trait's caller promises that it is null or valid for a pointer.
                let pfn = unsafe { Out::new(pfn) };
                // SAFETY: the trait's caller promises that it is null or valid for a result.
                let status = unsafe { Out::new(status) };
                code_of(self.get_proc_address(symbol, pfn, version, flags, status))
            }

            unsafe fn cuInit(&self, flags: u32) -> CUresult {
                // Before any lock is taken: a process that is forked meanwhile knows that it is, and waits for nobody.
                let begun = device::init(self.shared(), flags);
                self.answer(Call::cuInit, |_| begun)
            }

            unsafe fn cuDriverGetVersion(&self, version: *mut i32) -> CUresult {
                // SAFETY: the trait's caller promises that it is null or valid for an `i32`.
                let version = unsafe { Out::new(version) };
                code_of(version.give(|| Ok(self.machine().driver_version.0)))
            }

            unsafe fn cuGetErrorName(&self, error: CUresult, name: *mut *const c_char) -> CUresult {
                // SAFETY: the trait's caller promises that it is null or valid for a pointer.
                let name = unsafe { Out::new(name) };
                self.note_words_for_nobody(Call::cuGetErrorName, &name);
                code_of(words(codes::name_of(error), name))
            }

            unsafe fn cuGetErrorString(&self, error: CUresult, text: *mut *const c_char) -> CUresult {
                // SAFETY: the trait's caller promises that it is null or valid for a pointer.
                let text = unsafe { Out::new(text) };
                self.note_words_for_nobody(Call::cuGetErrorString, &text);
                code_of(words(codes::text_of(error), text))
            }

            $(
                unsafe fn $name(&self, $($arg: argument!($kind $ty)),*) -> CUresult {
                    $(wrap!($kind $arg);)*
                    self.answer(Call::$name, |$session: &mut Session<'_>| $work)
                }
            )*
        }
    };
}

fn code_of(answer: Answer) -> CUresult {
    answer.err().unwrap_or(CUresult::SUCCESS)
}

/// A code's name or text; NULL and 1 for an unknown code.
fn words(words: Option<&'static CStr>, out: Out<*const c_char>) -> Answer {
    out.put(words.map_or(std::ptr::null(), CStr::as_ptr));
    out.give(|| words.map(CStr::as_ptr).ok_or(CUresult::INVALID_VALUE))
}

impl Simulator {
    /// Nowhere to write the words for a code, which crashes a real driver. A forked child leaves the lock alone.
    fn note_words_for_nobody(&self, call: Call, out: &Out<*const c_char>) {
        if out.is_null() && !self.shared().is_forked() {
            self.shared().lock().note(call, "nowhere to write, which crashes a real driver".into());
        }
    }

    /// As the other calls that work before cuInit, it needs no state.
    fn get_proc_address(
        &self,
        symbol: In<c_char>,
        pfn: Out<*mut c_void>,
        version: i32,
        flags: u64,
        status: Out<CUdriverProcAddressQueryResult>,
    ) -> Answer {
        if !self.provides(Call::cuGetProcAddress) {
            return Err(CUresult::NOT_SUPPORTED);
        }
        pfn.required()?;
        let (address, found) = self.resolve(symbol.text()?, CudaVersion(version), flags)?;
        pfn.put(address.cast_mut());
        status.put(found);
        Ok(())
    }
}

/// Writes an attribute to what the caller made for one of its width.
///
/// # Safety
/// `data` is null or valid for writing an attribute of that width.
unsafe fn write(value: Value, data: Out<c_void>) {
    match value {
        // SAFETY: the caller vouches for the width.
        Value::Bool(value) => unsafe { data.of::<u8>() }.put(u8::from(value)),
        // SAFETY: as above.
        Value::Int(value) => unsafe { data.of::<u32>() }.put(value),
        // SAFETY: as above.
        Value::Long(value) => unsafe { data.of::<u64>() }.put(value),
    }
}

/// Asks for what several outputs take, of which any may be left out.
fn pair<A, B>(first: Out<A>, second: Out<B>, make: impl FnOnce() -> Answer<(A, B)>) -> Answer {
    let (one, other) = make()?;
    first.put(one);
    second.put(other);
    Ok(())
}

calls! {
    cuDeviceGet(out device: CUdevice, val ordinal: i32) |s| device.give(|| device::get(s, ordinal));
    cuDeviceGetCount(out count: i32) |s| count.give(|| Ok(device::count(s)));
    cuDeviceGetName(out name: c_char, val length: i32, val device: CUdevice) |s| {
        // SAFETY: the trait's caller promises room for `length` bytes.
        unsafe { name.text(&device::model(s, device)?.name, length) }
    };
    cuDeviceGetUuid(out uuid: CUuuid, val device: CUdevice) |s| uuid.give(|| Ok(device::model(s, device)?.uuid));
    cuDeviceGetAttribute(out value: i32, val attribute: CUdevice_attribute, val device: CUdevice) |s| {
        value.give(|| device::attribute(s, attribute, device))
    };
    cuDeviceTotalMem(out bytes: usize, val device: CUdevice) |s| {
        bytes.give(|| Ok(device::model(s, device)?.total_memory))
    };
    cuDeviceGetPCIBusId(out id: c_char, val length: i32, val device: CUdevice) |s| {
        // SAFETY: the trait's caller promises room for `length` bytes.
        unsafe { id.text(&device::pci_bus_id(s, device)?, length) }
    };
    cuDeviceCanAccessPeer(out can: i32, val device: CUdevice, val peer: CUdevice) |s| {
        can.give(|| device::can_access_peer(s, device, peer))
    };
    cuDeviceGetP2PAttribute(
        out value: i32, val attribute: CUdevice_P2PAttribute, val source: CUdevice, val destination: CUdevice
    ) |s| value.give(|| device::p2p_attribute(s, attribute, source, destination));

    cuDevicePrimaryCtxRetain(out context: CUcontext, val device: CUdevice) |s| {
        context.give(|| context::primary_retain(s, device))
    };
    cuDevicePrimaryCtxRelease(val device: CUdevice) |s| context::primary_release(s, device);
    cuDevicePrimaryCtxGetState(val device: CUdevice, out flags: u32, out active: i32) |s| {
        flags.required()?;
        active.required()?;
        pair(flags, active, || context::primary_state(s, device))
    };
    cuDevicePrimaryCtxReset(val device: CUdevice) |s| context::primary_reset(s, device);
    cuCtxGetCurrent(out context: CUcontext) |s| context.give(|| context::get_current(s));
    cuCtxSetCurrent(val context: CUcontext) |s| context::set_current(s, context);
    cuCtxPushCurrent(val context: CUcontext) |s| context::push(s, context);
    cuCtxPopCurrent(out context: CUcontext) |s| {
        context.put(context::pop(s)?);
        Ok(())
    };
    cuCtxGetDevice(out device: CUdevice) |s| device.give(|| context::device(s));
    cuCtxSynchronize() |s| context::synchronize(s);
    cuCtxDestroy(val context: CUcontext) |s| context::destroy_made(s, context);
    cuCtxEnablePeerAccess(val peer: CUcontext, val flags: u32) |s| context::enable_peer_access(s, peer, flags);

    cuStreamCreate(out stream: CUstream, val flags: CUstream_flags) |s| stream.give(|| stream::create(s, flags));
    cuStreamDestroy(val stream: CUstream) |s| stream::destroy(s, stream);
    cuStreamSynchronize(val stream: CUstream) |s| stream::synchronize(s, stream);
    cuStreamQuery(val stream: CUstream) |s| stream::query(s, stream);
    cuStreamIsCapturing(val stream: CUstream, out status: CUstreamCaptureStatus) |s| {
        status.give(|| Ok(capture::info(s, stream)?.status))
    };
    cuStreamGetCaptureInfo(
        val stream: CUstream, out status: CUstreamCaptureStatus, out id: u64, out graph: CUgraph,
        out dependencies: *const CUgraphNode, out count: usize
    ) |s| {
        status.required()?;
        let info = capture::info(s, stream)?;
        status.put(info.status);
        id.put(info.number);
        graph.put(info.graph);
        dependencies.put(info.dependencies);
        count.put(info.count);
        Ok(())
    };
    cuStreamBeginCapture(val stream: CUstream, val mode: CUstreamCaptureMode) |s| capture::begin(s, stream, mode);
    cuStreamEndCapture(val stream: CUstream, out graph: CUgraph) |s| {
        if !s.policy.capture_ends_unseen {
            graph.required()?;
        }
        let ended = capture::end(s, stream);
        graph.put(ended.unwrap_or_default());
        ended.map(|_| ())
    };
    cuThreadExchangeStreamCaptureMode(out mode: CUstreamCaptureMode) |s| {
        // SAFETY: the trait's caller left the mode to exchange there.
        let asked = unsafe { mode.as_input() }.read()?;
        mode.give(|| capture::exchange_mode(s, asked))
    };
    cuStreamGetCtx(val stream: CUstream, out context: CUcontext) |s| {
        context.give(|| context::stream_context(s, stream))
    };
    cuStreamGetDevice(val stream: CUstream, out device: CUdevice) |s| device.give(|| stream::device(s, stream));
    cuStreamWaitEvent(val stream: CUstream, val event: CUevent, val flags: u32) |s| {
        event::wait(s, stream, event, flags)
    };
    cuLaunchHostFunc(val stream: CUstream, val function: CUhostFn, val data: *mut c_void) |s| {
        copy::launch_host(s, stream, HostCall { function, data })
    };
    cuEventCreate(out event: CUevent, val flags: CUevent_flags) |s| event.give(|| event::create(s, flags));
    cuEventRecord(val event: CUevent, val stream: CUstream) |s| event::record(s, event, stream);
    cuEventQuery(val event: CUevent) |s| event::query(s, event);
    cuEventSynchronize(val event: CUevent) |s| event::synchronize(s, event);
    cuEventDestroy(val event: CUevent) |s| event::destroy(s, event);

    cuMemGetInfo(out free: usize, out total: usize) |s| {
        pair(free, total, || copy::info(s))
    };
    cuMemAlloc(out address: CUdeviceptr, val size: usize) |s| address.give(|| copy::allocate(s, size));
    cuMemFree(val address: CUdeviceptr) |s| copy::free(s, address);
    cuMemcpy(val to: CUdeviceptr, val from: CUdeviceptr, val bytes: usize) |s| {
        copy::copy(s, Side::unified(to), Side::unified(from), bytes)
    };
    cuMemcpyAsync(val to: CUdeviceptr, val from: CUdeviceptr, val bytes: usize, val stream: CUstream) |s| {
        copy::copy_async(s, Side::unified(to), Side::unified(from), bytes, stream)
    };
    cuMemcpyHtoD(val to: CUdeviceptr, val from: *const c_void, val bytes: usize) |s| {
        copy::copy(s, Side::device(to), Side::host(from), bytes)
    };
    cuMemcpyDtoH(val to: *mut c_void, val from: CUdeviceptr, val bytes: usize) |s| {
        copy::copy(s, Side::host(to), Side::device(from), bytes)
    };
    cuMemcpyDtoD(val to: CUdeviceptr, val from: CUdeviceptr, val bytes: usize) |s| {
        copy::copy(s, Side::device(to), Side::device(from), bytes)
    };
    cuMemcpyHtoDAsync(val to: CUdeviceptr, val from: *const c_void, val bytes: usize, val stream: CUstream) |s| {
        copy::copy_async(s, Side::device(to), Side::host(from), bytes, stream)
    };
    cuMemcpyDtoHAsync(val to: *mut c_void, val from: CUdeviceptr, val bytes: usize, val stream: CUstream) |s| {
        copy::copy_async(s, Side::host(to), Side::device(from), bytes, stream)
    };
    cuMemcpyDtoDAsync(val to: CUdeviceptr, val from: CUdeviceptr, val bytes: usize, val stream: CUstream) |s| {
        copy::copy_async(s, Side::device(to), Side::device(from), bytes, stream)
    };
    cuMemcpyPeer(
        val to: CUdeviceptr, val to_context: CUcontext, val from: CUdeviceptr, val from_context: CUcontext,
        val bytes: usize
    ) |s| copy::copy(s, Side::of(to, to_context), Side::of(from, from_context), bytes);
    cuMemcpyPeerAsync(
        val to: CUdeviceptr, val to_context: CUcontext, val from: CUdeviceptr, val from_context: CUcontext,
        val bytes: usize, val stream: CUstream
    ) |s| copy::copy_async(s, Side::of(to, to_context), Side::of(from, from_context), bytes, stream);
    cuMemsetD8(val to: CUdeviceptr, val value: u8, val count: usize) |s| copy::fill(s, to, &[value], count, None);
    cuMemsetD16(val to: CUdeviceptr, val value: u16, val count: usize) |s| {
        copy::fill(s, to, &value.to_ne_bytes(), count, None)
    };
    cuMemsetD32(val to: CUdeviceptr, val value: u32, val count: usize) |s| {
        copy::fill(s, to, &value.to_ne_bytes(), count, None)
    };
    cuMemsetD8Async(val to: CUdeviceptr, val value: u8, val count: usize, val stream: CUstream) |s| {
        copy::fill(s, to, &[value], count, Some(stream))
    };
    cuMemsetD16Async(val to: CUdeviceptr, val value: u16, val count: usize, val stream: CUstream) |s| {
        copy::fill(s, to, &value.to_ne_bytes(), count, Some(stream))
    };
    cuMemsetD32Async(val to: CUdeviceptr, val value: u32, val count: usize, val stream: CUstream) |s| {
        copy::fill(s, to, &value.to_ne_bytes(), count, Some(stream))
    };
    cuMemGetAddressRange(out base: CUdeviceptr, out size: usize, val address: CUdeviceptr) |s| {
        pair(base, size, || pointer::range(s, address))
    };
    cuPointerGetAttribute(out data: c_void, val attribute: CUpointer_attribute, val address: CUdeviceptr) |s| {
        data.required()?;
        let value = pointer::attribute(s, attribute, address)?;
        // SAFETY: the trait's caller promises room for the attribute.
        unsafe { write(value, data) };
        Ok(())
    };
    cuPointerGetAttributes(
        val count: u32, list attributes: CUpointer_attribute, list data: *mut c_void, val address: CUdeviceptr
    ) |s| {
        attributes.required()?;
        data.required()?;
        // SAFETY: the trait's caller promises that many attributes.
        let attributes = unsafe { attributes.all(count as usize) }?;
        // SAFETY: the trait's caller promises that many pointers.
        let data = unsafe { data.all(count as usize) }?;
        // SAFETY: the trait's caller promises that each is null or valid for its attribute.
        let data: Vec<_> = data.into_iter().map(|pointer| unsafe { Out::new(pointer) }).collect();
        data.iter().try_for_each(Out::required)?;
        let values = attributes.into_iter().map(|asked| pointer::attribute_or_zero(s, asked, address));
        let values: Vec<_> = values.collect::<Answer<_>>()?;
        for (value, data) in values.into_iter().zip(data) {
            // SAFETY: as above.
            unsafe { write(value, data) };
        }
        Ok(())
    };
    cuPointerSetAttribute(inp value: c_void, val attribute: CUpointer_attribute, val address: CUdeviceptr) |s| {
        value.required()?;
        pointer::set_attribute(s, attribute, address)
    };

    cuMemAddressReserve(
        out address: CUdeviceptr, val size: usize, val alignment: usize, val hint: CUdeviceptr, val flags: u64
    ) |s| address.give(|| reserve::reserve(s, size, alignment, hint, flags));
    cuMemAddressFree(val address: CUdeviceptr, val size: usize) |s| reserve::free(s, address, size);
    cuMemCreate(
        out handle: CUmemGenericAllocationHandle, val size: usize, inp properties: CUmemAllocationProp, val flags: u64
    ) |s| handle.give(|| create::create(s, size, properties.read()?, flags));
    cuMemRelease(val handle: CUmemGenericAllocationHandle) |s| create::release(s, handle);
    cuMemMap(
        val address: CUdeviceptr, val size: usize, val offset: usize, val handle: CUmemGenericAllocationHandle,
        val flags: u64
    ) |s| map::map(s, address, size, offset, handle, flags);
    cuMemUnmap(val address: CUdeviceptr, val size: usize) |s| map::unmap(s, address, size);
    cuMemSetAccess(
        val address: CUdeviceptr, val size: usize, inp descriptors: CUmemAccessDesc, val count: usize
    ) |s| {
        descriptors.required()?;
        // SAFETY: the trait's caller promises that many descriptors.
        let descriptors = unsafe { descriptors.all(count) }?;
        access::set(s, address, size, &descriptors)
    };
    cuMemGetAccess(out flags: u64, inp location: CUmemLocation, val address: CUdeviceptr) |s| {
        flags.give(|| access::get(s, location.read()?, address))
    };
    cuMemExportToShareableHandle(
        out shareable: c_void, val handle: CUmemGenericAllocationHandle, val kind: CUmemAllocationHandleType,
        val flags: u64
    ) |s| {
        match kind {
            CUmemAllocationHandleType::FABRIC => {
                // SAFETY: the trait's caller promises room for a handle of that kind.
                unsafe { shareable.of::<CUmemFabricHandle>() }.give(|| share::export_fabric(s, handle, flags))
            }
            CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR => {
                // SAFETY: the trait's caller promises room for a handle of that kind, which is a C int.
                unsafe { shareable.of::<i32>() }.give(|| share::export(s, handle, flags))
            }
            _ => create::live_handle(s, handle).and(Err(CUresult::INVALID_VALUE)),
        }
    };
    cuMemImportFromShareableHandle(
        out handle: CUmemGenericAllocationHandle, val os_handle: *mut c_void, val kind: CUmemAllocationHandleType
    ) |s| handle.give(|| match kind {
        CUmemAllocationHandleType::FABRIC => {
            share::has_fabric(s)?;
            // SAFETY: the trait's caller promises that it is null or a handle of that kind.
            share::import_fabric(s, &unsafe { In::new(os_handle.cast_const().cast()) }.read()?)
        }
        CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR => share::import(s, os_handle.addr() as u64),
        CUmemAllocationHandleType::WIN32 | CUmemAllocationHandleType::WIN32_KMT => Err(CUresult::NOT_SUPPORTED),
        _ => Err(CUresult::INVALID_VALUE),
    });
    cuMemGetHandleForAddressRange(
        out descriptor: c_void, val address: CUdeviceptr, val size: usize, val kind: CUmemRangeHandleType,
        val flags: u64
    ) |s| {
        // SAFETY: the trait's caller promises room for a handle of that kind, of which a C int alone is ever written.
        unsafe { descriptor.of::<i32>() }.give(|| share::dma_buf(s, address, size, kind, flags))
    };
    cuFlushGPUDirectRDMAWrites(
        val target: CUflushGPUDirectRDMAWritesTarget, val scope: CUflushGPUDirectRDMAWritesScope
    ) |s| share::flush(s, target, scope);
    cuMemGetAllocationGranularity(
        out granularity: usize, inp properties: CUmemAllocationProp, val option: CUmemAllocationGranularity_flags
    ) |s| {
        granularity.give(|| create::granularity(s, properties.read()?, option))
    };
    cuMemGetAllocationPropertiesFromHandle(
        out properties: CUmemAllocationProp, val handle: CUmemGenericAllocationHandle
    ) |s| properties.give(|| create::properties(s, handle));
    cuMemRetainAllocationHandle(out handle: CUmemGenericAllocationHandle, val address: *mut c_void) |s| {
        handle.give(|| create::retain(s, address.addr() as u64))
    };

    cuUserObjectCreate(
        out object: CUuserObject, val data: *mut c_void, val destroy: CUhostFn, val references: u32, val flags: u32
    ) |s| {
        let destructor = HostCall { function: destroy, data };
        object.give(|| user_object::create(s, destructor, references, CUuserObject_flags(flags)))
    };
    cuUserObjectRetain(val object: CUuserObject, val count: u32) |s| user_object::retain(s, object, count);
    cuUserObjectRelease(val object: CUuserObject, val count: u32) |s| user_object::release(s, object, count);
    cuGraphRetainUserObject(val graph: CUgraph, val object: CUuserObject, val count: u32, val flags: u32) |s| {
        user_object::graph_retain(s, graph, object, count, CUuserObjectRetain_flags(flags))
    };
    cuGraphReleaseUserObject(val graph: CUgraph, val object: CUuserObject, val count: u32) |s| {
        user_object::graph_release(s, graph, object, count)
    };
    cuGraphCreate(out graph: CUgraph, val flags: u32) |s| graph.give(|| graph::create(s, flags));
    cuGraphDestroy(val graph: CUgraph) |s| graph::destroy(s, graph);
    cuGraphAddMemcpyNode(
        out node: CUgraphNode, val graph: CUgraph, inp dependencies: CUgraphNode, val count: usize,
        inp parameters: CUDA_MEMCPY3D, val context: CUcontext
    ) |s| {
        // SAFETY: the trait's caller promises that many nodes.
        let after = unsafe { dependencies.all(count) }?;
        node.give(|| graph::add_memcpy(s, graph, &after, &parameters.read()?, context))
    };
    cuGraphAddMemsetNode(
        out node: CUgraphNode, val graph: CUgraph, inp dependencies: CUgraphNode, val count: usize,
        inp parameters: CUDA_MEMSET_NODE_PARAMS, val context: CUcontext
    ) |s| {
        // SAFETY: the trait's caller promises that many nodes.
        let after = unsafe { dependencies.all(count) }?;
        node.give(|| graph::add_memset(s, graph, &after, &parameters.read()?, context))
    };
    cuGraphAddHostNode(
        out node: CUgraphNode, val graph: CUgraph, inp dependencies: CUgraphNode, val count: usize,
        inp parameters: CUDA_HOST_NODE_PARAMS
    ) |s| {
        // SAFETY: the trait's caller promises that many nodes.
        let after = unsafe { dependencies.all(count) }?;
        let CUDA_HOST_NODE_PARAMS { host_fn: function, user_data: data } = parameters.read()?;
        node.give(|| graph::add_host(s, graph, &after, HostCall { function, data }))
    };
    cuGraphInstantiateWithFlags(out executable: CUgraphExec, val graph: CUgraph, val flags: u64) |s| {
        executable.give(|| graph::instantiate(s, graph, flags))
    };
    cuGraphLaunch(val executable: CUgraphExec, val stream: CUstream) |s| graph::launch(s, executable, stream);
    cuGraphExecDestroy(val executable: CUgraphExec) |s| graph::executable_destroy(s, executable);

    cuModuleLoadData(out module: CUmodule, inp image: c_void) |s| {
        // SAFETY: the trait's caller promises a text there that ends in NUL.
        module.give(|| module::load(s, &unsafe { image.of() }))
    };
    cuModuleGetFunction(out function: CUfunction, val module: CUmodule, inp name: c_char) |s| {
        function.give(|| module::function(s, module, &name))
    };
    cuModuleUnload(val module: CUmodule) |s| module::unload(s, module);
    cuLaunchKernel(
        val function: CUfunction, val grid_x: u32, val grid_y: u32, val grid_z: u32, val block_x: u32,
        val block_y: u32, val block_z: u32, val shared_bytes: u32, val stream: CUstream,
        list parameters: *mut c_void, list extra: *mut c_void
    ) |s| {
        if extra.required().is_ok() {
            return Err(CUresult::INVALID_VALUE);
        }
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared_bytes };
        // SAFETY: the trait's caller promises a pointer to a value of the right type for each parameter.
        module::launch(s, function, &shape, stream, |widths| unsafe { parameters.values(widths) })
    };
}
