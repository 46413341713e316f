//! The one list of entry points. Everything that has one item a call is generated from it: the trait, the
//! table, the decorator, the names and the C entry points of stand-ins.

/// Calls `$callback!` with the list: for whoever needs one item a call. Each row reads
/// `core|optional NAME "EXPORT" VERSION (ARGUMENT: TYPE, ...);`
/// where NAME is what cuGetProcAddress takes, EXPORT what the library exports, and VERSION the CUDA version of
/// this signature. A driver without a core entry point isn't loaded; without an optional one, that call alone
/// answers that it is unsupported. Stream arguments use the legacy ABI: default streams are named by token.
///
/// The types are those of [`sys`](crate::sys) and of `std::ffi`, by their bare names.
///
/// ```
/// macro_rules! count {
///     ($($kind:ident $name:ident $export:literal $version:literal ($($arg:ident: $ty:ty),*);)*) => {
///         [$(stringify!($name)),*].len()
///     };
/// }
///
/// assert_eq!(cuvmm_driver::for_each_call!(count), cuvmm_driver::Call::ALL.len());
/// ```
#[macro_export]
macro_rules! for_each_call {
    ($callback:ident) => {
        $callback! {
            optional cuGetProcAddress "cuGetProcAddress_v2" 12000 (symbol: *const c_char, pfn: *mut *mut c_void, version: i32, flags: u64, status: *mut CUdriverProcAddressQueryResult);

            core cuInit "cuInit" 2000 (flags: u32);
            core cuDriverGetVersion "cuDriverGetVersion" 2020 (version: *mut i32);
            core cuGetErrorName "cuGetErrorName" 6000 (error: CUresult, name: *mut *const c_char);
            core cuGetErrorString "cuGetErrorString" 6000 (error: CUresult, text: *mut *const c_char);
            core cuDeviceGet "cuDeviceGet" 2000 (device: *mut CUdevice, ordinal: i32);
            core cuDeviceGetCount "cuDeviceGetCount" 2000 (count: *mut i32);
            core cuDeviceGetName "cuDeviceGetName" 2000 (name: *mut c_char, length: i32, device: CUdevice);
            optional cuDeviceGetUuid "cuDeviceGetUuid_v2" 11040 (uuid: *mut CUuuid, device: CUdevice);
            core cuDeviceGetAttribute "cuDeviceGetAttribute" 2000 (value: *mut i32, attribute: CUdevice_attribute, device: CUdevice);
            core cuDeviceTotalMem "cuDeviceTotalMem_v2" 3020 (bytes: *mut usize, device: CUdevice);
            core cuDeviceGetPCIBusId "cuDeviceGetPCIBusId" 4010 (id: *mut c_char, length: i32, device: CUdevice);
            core cuDeviceCanAccessPeer "cuDeviceCanAccessPeer" 4000 (can: *mut i32, device: CUdevice, peer: CUdevice);
            core cuDeviceGetP2PAttribute "cuDeviceGetP2PAttribute" 8000 (value: *mut i32, attribute: CUdevice_P2PAttribute, source: CUdevice, destination: CUdevice);

            core cuDevicePrimaryCtxRetain "cuDevicePrimaryCtxRetain" 7000 (context: *mut CUcontext, device: CUdevice);
            core cuDevicePrimaryCtxRelease "cuDevicePrimaryCtxRelease_v2" 11000 (device: CUdevice);
            core cuDevicePrimaryCtxGetState "cuDevicePrimaryCtxGetState" 7000 (device: CUdevice, flags: *mut u32, active: *mut i32);
            core cuDevicePrimaryCtxReset "cuDevicePrimaryCtxReset_v2" 11000 (device: CUdevice);
            core cuCtxGetCurrent "cuCtxGetCurrent" 4000 (context: *mut CUcontext);
            core cuCtxSetCurrent "cuCtxSetCurrent" 4000 (context: CUcontext);
            core cuCtxPushCurrent "cuCtxPushCurrent_v2" 4000 (context: CUcontext);
            core cuCtxPopCurrent "cuCtxPopCurrent_v2" 4000 (context: *mut CUcontext);
            core cuCtxGetDevice "cuCtxGetDevice" 2000 (device: *mut CUdevice);
            core cuCtxSynchronize "cuCtxSynchronize" 2000 ();
            core cuCtxDestroy "cuCtxDestroy_v2" 4000 (context: CUcontext);
            core cuCtxEnablePeerAccess "cuCtxEnablePeerAccess" 4000 (peer: CUcontext, flags: u32);

            core cuStreamCreate "cuStreamCreate" 2000 (stream: *mut CUstream, flags: CUstream_flags);
            core cuStreamDestroy "cuStreamDestroy_v2" 4000 (stream: CUstream);
            core cuStreamSynchronize "cuStreamSynchronize" 2000 (stream: CUstream);
            core cuStreamQuery "cuStreamQuery" 2000 (stream: CUstream);
            core cuStreamIsCapturing "cuStreamIsCapturing" 10000 (stream: CUstream, status: *mut CUstreamCaptureStatus);
            optional cuStreamGetCaptureInfo "cuStreamGetCaptureInfo_v2" 11030 (stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut u64, graph: *mut CUgraph, dependencies: *mut *const CUgraphNode, count: *mut usize);
            core cuStreamBeginCapture "cuStreamBeginCapture_v2" 10010 (stream: CUstream, mode: CUstreamCaptureMode);
            core cuStreamEndCapture "cuStreamEndCapture" 10000 (stream: CUstream, graph: *mut CUgraph);
            core cuThreadExchangeStreamCaptureMode "cuThreadExchangeStreamCaptureMode" 10010 (mode: *mut CUstreamCaptureMode);
            core cuStreamGetCtx "cuStreamGetCtx" 9020 (stream: CUstream, context: *mut CUcontext);
            optional cuStreamGetDevice "cuStreamGetDevice" 12080 (stream: CUstream, device: *mut CUdevice);
            core cuStreamWaitEvent "cuStreamWaitEvent" 3020 (stream: CUstream, event: CUevent, flags: u32);
            core cuLaunchHostFunc "cuLaunchHostFunc" 10000 (stream: CUstream, function: CUhostFn, user_data: *mut c_void);
            core cuEventCreate "cuEventCreate" 2000 (event: *mut CUevent, flags: CUevent_flags);
            core cuEventRecord "cuEventRecord" 2000 (event: CUevent, stream: CUstream);
            core cuEventQuery "cuEventQuery" 2000 (event: CUevent);
            core cuEventSynchronize "cuEventSynchronize" 2000 (event: CUevent);
            core cuEventDestroy "cuEventDestroy_v2" 4000 (event: CUevent);

            core cuMemGetInfo "cuMemGetInfo_v2" 3020 (free: *mut usize, total: *mut usize);
            core cuMemAlloc "cuMemAlloc_v2" 3020 (address: *mut CUdeviceptr, size: usize);
            core cuMemFree "cuMemFree_v2" 3020 (address: CUdeviceptr);
            core cuMemcpy "cuMemcpy" 4000 (destination: CUdeviceptr, source: CUdeviceptr, bytes: usize);
            core cuMemcpyAsync "cuMemcpyAsync" 4000 (destination: CUdeviceptr, source: CUdeviceptr, bytes: usize, stream: CUstream);
            core cuMemcpyHtoD "cuMemcpyHtoD_v2" 3020 (destination: CUdeviceptr, source: *const c_void, bytes: usize);
            core cuMemcpyDtoH "cuMemcpyDtoH_v2" 3020 (destination: *mut c_void, source: CUdeviceptr, bytes: usize);
            core cuMemcpyDtoD "cuMemcpyDtoD_v2" 3020 (destination: CUdeviceptr, source: CUdeviceptr, bytes: usize);
            core cuMemcpyHtoDAsync "cuMemcpyHtoDAsync_v2" 3020 (destination: CUdeviceptr, source: *const c_void, bytes: usize, stream: CUstream);
            core cuMemcpyDtoHAsync "cuMemcpyDtoHAsync_v2" 3020 (destination: *mut c_void, source: CUdeviceptr, bytes: usize, stream: CUstream);
            core cuMemcpyDtoDAsync "cuMemcpyDtoDAsync_v2" 3020 (destination: CUdeviceptr, source: CUdeviceptr, bytes: usize, stream: CUstream);
            core cuMemcpyPeer "cuMemcpyPeer" 4000 (destination: CUdeviceptr, destination_context: CUcontext, source: CUdeviceptr, source_context: CUcontext, bytes: usize);
            core cuMemcpyPeerAsync "cuMemcpyPeerAsync" 4000 (destination: CUdeviceptr, destination_context: CUcontext, source: CUdeviceptr, source_context: CUcontext, bytes: usize, stream: CUstream);
            core cuMemsetD8 "cuMemsetD8_v2" 3020 (destination: CUdeviceptr, value: u8, count: usize);
            core cuMemsetD16 "cuMemsetD16_v2" 3020 (destination: CUdeviceptr, value: u16, count: usize);
            core cuMemsetD32 "cuMemsetD32_v2" 3020 (destination: CUdeviceptr, value: u32, count: usize);
            core cuMemsetD8Async "cuMemsetD8Async" 3020 (destination: CUdeviceptr, value: u8, count: usize, stream: CUstream);
            core cuMemsetD16Async "cuMemsetD16Async" 3020 (destination: CUdeviceptr, value: u16, count: usize, stream: CUstream);
            core cuMemsetD32Async "cuMemsetD32Async" 3020 (destination: CUdeviceptr, value: u32, count: usize, stream: CUstream);
            core cuMemGetAddressRange "cuMemGetAddressRange_v2" 3020 (base: *mut CUdeviceptr, size: *mut usize, address: CUdeviceptr);
            core cuPointerGetAttribute "cuPointerGetAttribute" 4000 (data: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr);
            core cuPointerGetAttributes "cuPointerGetAttributes" 7000 (count: u32, attributes: *mut CUpointer_attribute, data: *mut *mut c_void, address: CUdeviceptr);
            core cuPointerSetAttribute "cuPointerSetAttribute" 6000 (value: *const c_void, attribute: CUpointer_attribute, address: CUdeviceptr);
            optional cuFlushGPUDirectRDMAWrites "cuFlushGPUDirectRDMAWrites" 11030 (target: CUflushGPUDirectRDMAWritesTarget, scope: CUflushGPUDirectRDMAWritesScope);

            core cuMemAddressReserve "cuMemAddressReserve" 10020 (address: *mut CUdeviceptr, size: usize, alignment: usize, hint: CUdeviceptr, flags: u64);
            core cuMemAddressFree "cuMemAddressFree" 10020 (address: CUdeviceptr, size: usize);
            core cuMemCreate "cuMemCreate" 10020 (handle: *mut CUmemGenericAllocationHandle, size: usize, properties: *const CUmemAllocationProp, flags: u64);
            core cuMemRelease "cuMemRelease" 10020 (handle: CUmemGenericAllocationHandle);
            core cuMemMap "cuMemMap" 10020 (address: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64);
            core cuMemUnmap "cuMemUnmap" 10020 (address: CUdeviceptr, size: usize);
            core cuMemSetAccess "cuMemSetAccess" 10020 (address: CUdeviceptr, size: usize, descriptors: *const CUmemAccessDesc, count: usize);
            core cuMemGetAccess "cuMemGetAccess" 10020 (flags: *mut u64, location: *const CUmemLocation, address: CUdeviceptr);
            core cuMemExportToShareableHandle "cuMemExportToShareableHandle" 10020 (shareable: *mut c_void, handle: CUmemGenericAllocationHandle, handle_type: CUmemAllocationHandleType, flags: u64);
            core cuMemImportFromShareableHandle "cuMemImportFromShareableHandle" 10020 (handle: *mut CUmemGenericAllocationHandle, os_handle: *mut c_void, handle_type: CUmemAllocationHandleType);
            core cuMemGetAllocationGranularity "cuMemGetAllocationGranularity" 10020 (granularity: *mut usize, properties: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags);
            core cuMemGetAllocationPropertiesFromHandle "cuMemGetAllocationPropertiesFromHandle" 10020 (properties: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle);
            optional cuMemRetainAllocationHandle "cuMemRetainAllocationHandle" 11000 (handle: *mut CUmemGenericAllocationHandle, address: *mut c_void);
            optional cuMemGetHandleForAddressRange "cuMemGetHandleForAddressRange" 11070 (handle: *mut c_void, address: CUdeviceptr, size: usize, handle_type: CUmemRangeHandleType, flags: u64);

            optional cuUserObjectCreate "cuUserObjectCreate" 11030 (object: *mut CUuserObject, user_data: *mut c_void, destroy: CUhostFn, initial_references: u32, flags: u32);
            optional cuUserObjectRetain "cuUserObjectRetain" 11030 (object: CUuserObject, count: u32);
            optional cuUserObjectRelease "cuUserObjectRelease" 11030 (object: CUuserObject, count: u32);
            optional cuGraphRetainUserObject "cuGraphRetainUserObject" 11030 (graph: CUgraph, object: CUuserObject, count: u32, flags: u32);
            optional cuGraphReleaseUserObject "cuGraphReleaseUserObject" 11030 (graph: CUgraph, object: CUuserObject, count: u32);
            optional cuGraphCreate "cuGraphCreate" 10000 (graph: *mut CUgraph, flags: u32);
            optional cuGraphDestroy "cuGraphDestroy" 10000 (graph: CUgraph);
            optional cuGraphAddMemcpyNode "cuGraphAddMemcpyNode" 10000 (node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize, parameters: *const CUDA_MEMCPY3D, context: CUcontext);
            optional cuGraphAddMemsetNode "cuGraphAddMemsetNode" 10000 (node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize, parameters: *const CUDA_MEMSET_NODE_PARAMS, context: CUcontext);
            optional cuGraphAddHostNode "cuGraphAddHostNode" 10000 (node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize, parameters: *const CUDA_HOST_NODE_PARAMS);
            optional cuGraphInstantiateWithFlags "cuGraphInstantiateWithFlags" 11040 (executable: *mut CUgraphExec, graph: CUgraph, flags: u64);
            optional cuGraphLaunch "cuGraphLaunch" 10000 (executable: CUgraphExec, stream: CUstream);
            optional cuGraphExecDestroy "cuGraphExecDestroy" 10000 (executable: CUgraphExec);

            optional cuModuleLoadData "cuModuleLoadData" 2000 (module: *mut CUmodule, image: *const c_void);
            optional cuModuleGetFunction "cuModuleGetFunction" 2000 (function: *mut CUfunction, module: CUmodule, name: *const c_char);
            optional cuModuleUnload "cuModuleUnload" 2000 (module: CUmodule);
            optional cuLaunchKernel "cuLaunchKernel" 4000 (function: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared_bytes: u32, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void);
        }
    };
}

pub(crate) use for_each_call;
