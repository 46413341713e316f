//! The driver's names beyond the list, which answer that they are not supported. A table: what NVIDIA's and others'
//! bindings look for.
//!
//! # Safety
//! Every one is the same function without parameters: in the C calling convention of the systems that this crate is
//! for, the caller cleans up what it passes, and the function looks at none of it.
#![allow(unsafe_code)]

use cuvmm_driver::CUresult;

macro_rules! beyond {
    ($($export:ident)*) => {
        /// The names that the library exports beyond the list.
        pub(crate) const EXPORTS: &[&str] = &[$(stringify!($export)),*];

        $(
            const _: () = {
                #[unsafe(export_name = stringify!($export))]
                extern "C" fn unsupported() -> CUresult {
                    CUresult::NOT_SUPPORTED
                }
            };
        )*
    };
}

/// What answers for a call beyond the list.
pub(crate) extern "C" fn unsupported() -> CUresult {
    CUresult::NOT_SUPPORTED
}

beyond! {
    cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayCreate_v2 cuArrayDestroy cuArrayGetDescriptor_v2
    cuArrayGetMemoryRequirements cuArrayGetPlane cuArrayGetSparseProperties cuCheckpointProcessCheckpoint
    cuCheckpointProcessGetRestoreThreadId cuCheckpointProcessGetState cuCheckpointProcessLock
    cuCheckpointProcessRestore cuCheckpointProcessUnlock cuCoredumpDeregisterCompleteCallback
    cuCoredumpDeregisterStartCallback cuCoredumpGetAttribute cuCoredumpGetAttributeGlobal
    cuCoredumpRegisterCompleteCallback cuCoredumpRegisterStartCallback cuCoredumpSetAttribute
    cuCoredumpSetAttributeGlobal cuCtxAttach cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDetach
    cuCtxDisablePeerAccess cuCtxFromGreenCtx cuCtxGetApiVersion cuCtxGetCacheConfig cuCtxGetDevResource
    cuCtxGetDevice_v2 cuCtxGetExecAffinity cuCtxGetFlags cuCtxGetId cuCtxGetLimit cuCtxGetSharedMemConfig
    cuCtxGetStreamPriorityRange cuCtxRecordEvent cuCtxResetPersistingL2Cache cuCtxSetCacheConfig cuCtxSetFlags
    cuCtxSetLimit cuCtxSetSharedMemConfig cuCtxSynchronize_v2 cuCtxWaitEvent cuDestroyExternalMemory
    cuDestroyExternalSemaphore cuDevResourceGenerateDesc cuDevSmResourceSplit cuDevSmResourceSplitByCount
    cuDeviceComputeCapability cuDeviceGetByPCIBusId cuDeviceGetCliqueCount cuDeviceGetCliqueInfo
    cuDeviceGetDefaultMemPool cuDeviceGetDevResource cuDeviceGetExecAffinitySupport cuDeviceGetFabricClusterUuid
    cuDeviceGetGraphMemAttribute cuDeviceGetHostAtomicCapabilities cuDeviceGetLuid cuDeviceGetMemPool
    cuDeviceGetNvSciSyncAttributes cuDeviceGetP2PAtomicCapabilities cuDeviceGetProperties
    cuDeviceGetTexture1DLinearMaxWidth cuDeviceGetUuid cuDeviceGraphMemTrim cuDevicePrimaryCtxRelease
    cuDevicePrimaryCtxReset cuDevicePrimaryCtxSetFlags cuDevicePrimaryCtxSetFlags_v2
    cuDeviceRegisterAsyncNotification cuDeviceSetGraphMemAttribute cuDeviceSetMemPool
    cuDeviceUnregisterAsyncNotification cuEGLStreamConsumerAcquireFrame cuEGLStreamConsumerConnect
    cuEGLStreamConsumerConnectWithFlags cuEGLStreamConsumerDisconnect cuEGLStreamConsumerReleaseFrame
    cuEGLStreamProducerConnect cuEGLStreamProducerDisconnect cuEGLStreamProducerPresentFrame
    cuEGLStreamProducerReturnFrame cuEventCreateFromEGLSync cuEventElapsedTime cuEventElapsedTime_v2
    cuEventRecordWithFlags cuEventRecordWithFlags_ptsz cuExternalMemoryGetMappedBuffer
    cuExternalMemoryGetMappedMipmappedArray cuFuncGetAttribute cuFuncGetModule cuFuncGetName cuFuncGetParamCount
    cuFuncGetParamInfo cuFuncIsLoaded cuFuncLoad cuFuncSetAttribute cuFuncSetBlockShape cuFuncSetCacheConfig
    cuFuncSetSharedMemConfig cuFuncSetSharedSize cuGLGetDevices_v2 cuGraphAddBatchMemOpNode
    cuGraphAddChildGraphNode cuGraphAddDependencies cuGraphAddDependencies_v2 cuGraphAddEmptyNode
    cuGraphAddEventRecordNode cuGraphAddEventWaitNode cuGraphAddExternalSemaphoresSignalNode
    cuGraphAddExternalSemaphoresWaitNode cuGraphAddKernelNode cuGraphAddKernelNode_v2 cuGraphAddMemAllocNode
    cuGraphAddMemFreeNode cuGraphAddNode cuGraphAddNode_v2 cuGraphAddNode_v3 cuGraphBatchMemOpNodeGetParams
    cuGraphBatchMemOpNodeSetParams cuGraphChildGraphNodeGetGraph cuGraphClone cuGraphConditionalHandleCreate
    cuGraphDebugDotPrint cuGraphDestroyNode cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent
    cuGraphEventWaitNodeGetEvent cuGraphEventWaitNodeSetEvent cuGraphExecBatchMemOpNodeSetParams
    cuGraphExecChildGraphNodeSetParams cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent
    cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams
    cuGraphExecGetFlags cuGraphExecGetId cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams
    cuGraphExecKernelNodeSetParams_v2 cuGraphExecMemcpyNodeSetParams cuGraphExecMemsetNodeSetParams
    cuGraphExecNodeSetParams cuGraphExecUpdate cuGraphExecUpdate_v2 cuGraphExternalSemaphoresSignalNodeGetParams
    cuGraphExternalSemaphoresSignalNodeSetParams cuGraphExternalSemaphoresWaitNodeGetParams
    cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges cuGraphGetEdges_v2 cuGraphGetId cuGraphGetNodes
    cuGraphGetRootNodes cuGraphHostNodeGetParams cuGraphHostNodeSetParams cuGraphInstantiate
    cuGraphInstantiateWithParams cuGraphInstantiateWithParams_ptsz cuGraphInstantiate_v2
    cuGraphKernelNodeCopyAttributes cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams
    cuGraphKernelNodeGetParams_v2 cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams
    cuGraphKernelNodeSetParams_v2 cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams
    cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams cuGraphMemsetNodeSetParams
    cuGraphNodeFindInClone cuGraphNodeGetContainingGraph cuGraphNodeGetDependencies cuGraphNodeGetDependencies_v2
    cuGraphNodeGetDependentNodes cuGraphNodeGetDependentNodes_v2 cuGraphNodeGetEnabled cuGraphNodeGetLocalId
    cuGraphNodeGetParams cuGraphNodeGetToolsId cuGraphNodeGetType cuGraphNodeSetEnabled cuGraphNodeSetParams
    cuGraphNodeSetParams_v2 cuGraphRemoveDependencies cuGraphRemoveDependencies_v2 cuGraphUpload cuGraphUpload_ptsz
    cuGraphicsEGLRegisterImage cuGraphicsGLRegisterBuffer cuGraphicsGLRegisterImage cuGraphicsMapResources
    cuGraphicsMapResources_ptsz cuGraphicsResourceGetMappedEglFrame cuGraphicsResourceGetMappedMipmappedArray
    cuGraphicsResourceGetMappedPointer_v2 cuGraphicsResourceSetMapFlags_v2 cuGraphicsSubResourceGetMappedArray
    cuGraphicsUnmapResources cuGraphicsUnmapResources_ptsz cuGraphicsUnregisterResource
    cuGraphicsVDPAURegisterOutputSurface cuGraphicsVDPAURegisterVideoSurface cuGreenCtxCreate cuGreenCtxDestroy
    cuGreenCtxGetDevResource cuGreenCtxGetId cuGreenCtxRecordEvent cuGreenCtxStreamCreate cuGreenCtxWaitEvent
    cuImportExternalMemory cuImportExternalSemaphore cuIpcCloseMemHandle cuIpcGetEventHandle cuIpcGetMemHandle
    cuIpcOpenEventHandle cuIpcOpenMemHandle cuIpcOpenMemHandle_v2 cuKernelGetAttribute cuKernelGetFunction
    cuKernelGetLibrary cuKernelGetName cuKernelGetParamCount cuKernelGetParamInfo cuKernelSetAttribute
    cuKernelSetCacheConfig cuLaunch cuLaunchCooperativeKernel cuLaunchCooperativeKernelMultiDevice
    cuLaunchCooperativeKernel_ptsz cuLaunchGrid cuLaunchGridAsync cuLaunchHostFunc_v2 cuLaunchKernelEx
    cuLaunchKernelEx_ptsz cuLibraryEnumerateKernels cuLibraryGetGlobal cuLibraryGetKernel cuLibraryGetKernelCount
    cuLibraryGetManaged cuLibraryGetModule cuLibraryGetUnifiedFunction cuLibraryLoadData cuLibraryLoadFromFile
    cuLibraryUnload cuLinkAddData_v2 cuLinkAddFile_v2 cuLinkComplete cuLinkCreate_v2 cuLinkDestroy
    cuLogicalEndpointAddDevice cuLogicalEndpointBindAddr cuLogicalEndpointBindMem cuLogicalEndpointCreate
    cuLogicalEndpointDestroy cuLogicalEndpointExport cuLogicalEndpointGetLimits cuLogicalEndpointIdRelease
    cuLogicalEndpointIdReserve cuLogicalEndpointImport cuLogicalEndpointQuery cuLogicalEndpointUnbind cuLogsCurrent
    cuLogsDumpToFile cuLogsDumpToMemory cuLogsRegisterCallback cuLogsUnregisterCallback cuMemAdvise cuMemAdvise_v2
    cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz cuMemAllocHost_v2
    cuMemAllocManaged cuMemAllocPitch_v2 cuMemBatchDecompressAsync cuMemBatchDecompressAsync_ptsz
    cuMemDiscardAndPrefetchBatchAsync cuMemDiscardAndPrefetchBatchAsync_ptsz cuMemDiscardBatchAsync
    cuMemDiscardBatchAsync_ptsz cuMemFreeAsync cuMemFreeAsync_ptsz cuMemFreeHost cuMemGetDefaultMemPool
    cuMemGetLocationInfo cuMemGetMemPool cuMemHostAlloc cuMemHostGetDevicePointer_v2 cuMemHostGetFlags
    cuMemHostRegister_v2 cuMemHostUnregister cuMemMapArrayAsync cuMemMapArrayAsync_ptsz cuMemPoolCreate
    cuMemPoolDestroy cuMemPoolExportPointer cuMemPoolExportToShareableHandle cuMemPoolGetAccess
    cuMemPoolGetAttribute cuMemPoolImportFromShareableHandle cuMemPoolImportPointer cuMemPoolSetAccess
    cuMemPoolSetAttribute cuMemPoolTrimTo cuMemPrefetchAsync cuMemPrefetchAsync_v2 cuMemPrefetchAsync_v2_ptsz
    cuMemPrefetchBatchAsync cuMemPrefetchBatchAsync_ptsz cuMemRangeGetAttribute cuMemRangeGetAttributes
    cuMemSetMemPool cuMemcpy2DAsync_v2 cuMemcpy2DAsync_v2_ptsz cuMemcpy2DUnaligned_v2 cuMemcpy2DUnaligned_v2_ptds
    cuMemcpy2D_v2 cuMemcpy2D_v2_ptds cuMemcpy3DAsync_v2 cuMemcpy3DAsync_v2_ptsz cuMemcpy3DBatchAsync
    cuMemcpy3DBatchAsync_v2 cuMemcpy3DBatchAsync_v2_ptsz cuMemcpy3DPeer cuMemcpy3DPeerAsync
    cuMemcpy3DPeerAsync_ptsz cuMemcpy3DPeer_ptds cuMemcpy3DWithAttributesAsync cuMemcpy3D_v2 cuMemcpy3D_v2_ptds
    cuMemcpyAtoA_v2 cuMemcpyAtoA_v2_ptds cuMemcpyAtoD_v2 cuMemcpyAtoD_v2_ptds cuMemcpyAtoHAsync_v2
    cuMemcpyAtoHAsync_v2_ptsz cuMemcpyAtoH_v2 cuMemcpyAtoH_v2_ptds cuMemcpyBatchAsync cuMemcpyBatchAsync_v2
    cuMemcpyBatchAsync_v2_ptsz cuMemcpyDtoA_v2 cuMemcpyDtoA_v2_ptds cuMemcpyHtoAAsync_v2 cuMemcpyHtoAAsync_v2_ptsz
    cuMemcpyHtoA_v2 cuMemcpyHtoA_v2_ptds cuMemcpyWithAttributesAsync cuMemsetD2D16Async cuMemsetD2D16Async_ptsz
    cuMemsetD2D16_v2 cuMemsetD2D16_v2_ptds cuMemsetD2D32Async cuMemsetD2D32Async_ptsz cuMemsetD2D32_v2
    cuMemsetD2D32_v2_ptds cuMemsetD2D8Async cuMemsetD2D8Async_ptsz cuMemsetD2D8_v2 cuMemsetD2D8_v2_ptds
    cuMipmappedArrayCreate cuMipmappedArrayDestroy cuMipmappedArrayGetLevel cuMipmappedArrayGetMemoryRequirements
    cuMipmappedArrayGetSparseProperties cuModuleEnumerateFunctions cuModuleGetFunctionCount cuModuleGetGlobal_v2
    cuModuleGetLoadingMode cuModuleGetSurfRef cuModuleGetTexRef cuModuleLoad cuModuleLoadDataEx
    cuModuleLoadFatBinary cuMulticastAddDevice cuMulticastBindAddr cuMulticastBindAddr_v2 cuMulticastBindMem
    cuMulticastBindMem_v2 cuMulticastCreate cuMulticastGetGranularity cuMulticastUnbind
    cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters
    cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags cuOccupancyMaxPotentialClusterSize
    cuParamSetSize cuParamSetTexRef cuParamSetf cuParamSeti cuParamSetv cuProfilerInitialize cuProfilerStart
    cuProfilerStop cuSignalExternalSemaphoresAsync cuSignalExternalSemaphoresAsync_ptsz cuStreamAddCallback
    cuStreamAddCallback_ptsz cuStreamAttachMemAsync cuStreamAttachMemAsync_ptsz cuStreamBatchMemOp
    cuStreamBatchMemOp_v2 cuStreamBatchMemOp_v2_ptsz cuStreamBeginCaptureToCig cuStreamBeginCaptureToGraph
    cuStreamBeginCaptureToGraph_ptsz cuStreamBeginRecaptureToGraph cuStreamCopyAttributes
    cuStreamCopyAttributes_ptsz cuStreamCreateWithPriority cuStreamEndCaptureToCig cuStreamGetAttribute
    cuStreamGetAttribute_ptsz cuStreamGetCaptureInfo cuStreamGetCaptureInfo_v3 cuStreamGetCaptureInfo_v3_ptsz
    cuStreamGetCtx_v2 cuStreamGetCtx_v2_ptsz cuStreamGetDevResource cuStreamGetFlags cuStreamGetFlags_ptsz
    cuStreamGetGreenCtx cuStreamGetId cuStreamGetId_ptsz cuStreamGetPriority cuStreamGetPriority_ptsz
    cuStreamSetAttribute cuStreamSetAttribute_ptsz cuStreamUpdateCaptureDependencies
    cuStreamUpdateCaptureDependencies_v2 cuStreamUpdateCaptureDependencies_v2_ptsz cuStreamWaitValue32
    cuStreamWaitValue32_v2 cuStreamWaitValue32_v2_ptsz cuStreamWaitValue64 cuStreamWaitValue64_v2
    cuStreamWaitValue64_v2_ptsz cuStreamWriteValue32 cuStreamWriteValue32_v2 cuStreamWriteValue32_v2_ptsz
    cuStreamWriteValue64 cuStreamWriteValue64_v2 cuStreamWriteValue64_v2_ptsz cuSurfObjectCreate
    cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuSurfRefGetArray cuSurfRefSetArray cuTensorMapEncodeIm2col
    cuTensorMapEncodeIm2colWide cuTensorMapEncodeTiled cuTensorMapReplaceAddress cuTexObjectCreate
    cuTexObjectDestroy cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc
    cuTexRefCreate cuTexRefDestroy cuTexRefGetAddressMode cuTexRefGetAddress_v2 cuTexRefGetArray
    cuTexRefGetBorderColor cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat cuTexRefGetMaxAnisotropy
    cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp cuTexRefGetMipmappedArray
    cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode cuTexRefSetAddress_v2 cuTexRefSetArray cuTexRefSetBorderColor
    cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode
    cuTexRefSetMipmapLevelBias cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray cuVDPAUCtxCreate_v2
    cuVDPAUGetDevice cuWaitExternalSemaphoresAsync cuWaitExternalSemaphoresAsync_ptsz
}
