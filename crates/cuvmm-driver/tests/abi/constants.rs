//! Every number of `sys` that has a name: flags, kinds, attributes and result codes.

use cuda_driver_sys as old;
use cudarc::driver::sys as new;
use cuvmm_driver::sys;

/// Compares named numbers with those of each binding that has them.
macro_rules! numbers {
    ($($ty:ident { $($ours:ident: $theirs:ident [$($binding:ident)*],)* })*) => {
        #[test]
        fn numbers_are_the_same() {
            $($($(
                assert_eq!(sys::$ty::$ours.0, $binding::$ty::$theirs as u32, stringify!($theirs));
            )*)*)*
        }

        const NUMBERS: &[&str] = &[$($(concat!(stringify!($ty), "::", stringify!($ours)),)*)*];
    };
}

/// Compares result codes, and the name that is said where the driver gives none.
macro_rules! codes {
    ($($ours:ident: $theirs:ident [$($binding:ident)*],)*) => {
        #[test]
        fn codes_are_the_same() {
            $($(
                assert_eq!(sys::CUresult::$ours.0, $binding::CUresult::$theirs as u32, stringify!($theirs));
            )*)*
        }

        #[test]
        fn codes_are_called_the_same() {
            $(assert_eq!(sys::CUresult::$ours.known_name(), Some(stringify!($theirs)));)*
        }

        const CODES: &[&str] = &[$(stringify!($ours),)*];
    };
}

numbers! {
    CUdriverProcAddressQueryResult {
        SUCCESS: CU_GET_PROC_ADDRESS_SUCCESS [new],
        SYMBOL_NOT_FOUND: CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND [new],
        VERSION_NOT_SUFFICIENT: CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT [new],
    }
    CUmemAllocationType {
        PINNED: CU_MEM_ALLOCATION_TYPE_PINNED [old new],
    }
    CUmemAllocationHandleType {
        NONE: CU_MEM_HANDLE_TYPE_NONE [],
        POSIX_FILE_DESCRIPTOR: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR [old],
        WIN32: CU_MEM_HANDLE_TYPE_WIN32 [old],
        WIN32_KMT: CU_MEM_HANDLE_TYPE_WIN32_KMT [old],
        FABRIC: CU_MEM_HANDLE_TYPE_FABRIC [],
    }
    CUmemLocationType {
        INVALID: CU_MEM_LOCATION_TYPE_INVALID [old new],
        DEVICE: CU_MEM_LOCATION_TYPE_DEVICE [old new],
        HOST: CU_MEM_LOCATION_TYPE_HOST [new],
        HOST_NUMA: CU_MEM_LOCATION_TYPE_HOST_NUMA [new],
        HOST_NUMA_CURRENT: CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT [new],
    }
    CUmemAccess_flags {
        NONE: CU_MEM_ACCESS_FLAGS_PROT_NONE [old new],
        READ: CU_MEM_ACCESS_FLAGS_PROT_READ [old new],
        READWRITE: CU_MEM_ACCESS_FLAGS_PROT_READWRITE [old new],
    }
    CUmemAllocationGranularity_flags {
        MINIMUM: CU_MEM_ALLOC_GRANULARITY_MINIMUM [old new],
        RECOMMENDED: CU_MEM_ALLOC_GRANULARITY_RECOMMENDED [old new],
    }
    CUmemRangeHandleType {
        DMA_BUF_FD: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD [new],
    }
    CUstreamCaptureStatus {
        NONE: CU_STREAM_CAPTURE_STATUS_NONE [old new],
        ACTIVE: CU_STREAM_CAPTURE_STATUS_ACTIVE [old new],
        INVALIDATED: CU_STREAM_CAPTURE_STATUS_INVALIDATED [old new],
    }
    CUstreamCaptureMode {
        GLOBAL: CU_STREAM_CAPTURE_MODE_GLOBAL [old new],
        THREAD_LOCAL: CU_STREAM_CAPTURE_MODE_THREAD_LOCAL [old new],
        RELAXED: CU_STREAM_CAPTURE_MODE_RELAXED [old new],
    }
    CUstream_flags {
        DEFAULT: CU_STREAM_DEFAULT [old new],
        NON_BLOCKING: CU_STREAM_NON_BLOCKING [old new],
    }
    CUevent_flags {
        DEFAULT: CU_EVENT_DEFAULT [old new],
        BLOCKING_SYNC: CU_EVENT_BLOCKING_SYNC [old new],
        DISABLE_TIMING: CU_EVENT_DISABLE_TIMING [old new],
        INTERPROCESS: CU_EVENT_INTERPROCESS [old new],
    }
    CUuserObject_flags {
        NO_DESTRUCTOR_SYNC: CU_USER_OBJECT_NO_DESTRUCTOR_SYNC [new],
    }
    CUuserObjectRetain_flags {
        MOVE: CU_GRAPH_USER_OBJECT_MOVE [new],
    }
    CUmemorytype {
        HOST: CU_MEMORYTYPE_HOST [old new],
        DEVICE: CU_MEMORYTYPE_DEVICE [old new],
        ARRAY: CU_MEMORYTYPE_ARRAY [old new],
        UNIFIED: CU_MEMORYTYPE_UNIFIED [old new],
    }
    CUdevice_P2PAttribute {
        PERFORMANCE_RANK: CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK [old new],
        ACCESS_SUPPORTED: CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED [old new],
        NATIVE_ATOMIC_SUPPORTED: CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED [old new],
        CUDA_ARRAY_ACCESS_SUPPORTED: CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED [old new],
    }
    CUflushGPUDirectRDMAWritesTarget {
        CURRENT_CTX: CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX [new],
    }
    CUflushGPUDirectRDMAWritesScope {
        TO_OWNER: CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER [new],
        TO_ALL_DEVICES: CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES [new],
    }
    CUdevice_attribute {
        INTEGRATED: CU_DEVICE_ATTRIBUTE_INTEGRATED [old new],
        COMPUTE_MODE: CU_DEVICE_ATTRIBUTE_COMPUTE_MODE [old new],
        PCI_BUS_ID: CU_DEVICE_ATTRIBUTE_PCI_BUS_ID [old new],
        PCI_DEVICE_ID: CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID [old new],
        UNIFIED_ADDRESSING: CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING [old new],
        PCI_DOMAIN_ID: CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID [old new],
        COMPUTE_CAPABILITY_MAJOR: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR [old new],
        COMPUTE_CAPABILITY_MINOR: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR [old new],
        VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED [new],
        VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED [old],
        HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED [old new],
        HANDLE_TYPE_WIN32_HANDLE_SUPPORTED: CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED [old new],
        HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED: CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED [old new],
        GENERIC_COMPRESSION_SUPPORTED: CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED [new],
        GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED [new],
        GPU_DIRECT_RDMA_SUPPORTED: CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED [new],
        DMA_BUF_SUPPORTED: CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED [new],
        HANDLE_TYPE_FABRIC_SUPPORTED: CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED [new],
        HOST_NUMA_ID: CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID [new],
        HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED [new],
        HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED [new],
    }
    CUpointer_attribute {
        CONTEXT: CU_POINTER_ATTRIBUTE_CONTEXT [old new],
        MEMORY_TYPE: CU_POINTER_ATTRIBUTE_MEMORY_TYPE [old new],
        DEVICE_POINTER: CU_POINTER_ATTRIBUTE_DEVICE_POINTER [old new],
        HOST_POINTER: CU_POINTER_ATTRIBUTE_HOST_POINTER [old new],
        SYNC_MEMOPS: CU_POINTER_ATTRIBUTE_SYNC_MEMOPS [old new],
        BUFFER_ID: CU_POINTER_ATTRIBUTE_BUFFER_ID [old new],
        IS_MANAGED: CU_POINTER_ATTRIBUTE_IS_MANAGED [old new],
        DEVICE_ORDINAL: CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL [old new],
        IS_LEGACY_CUDA_IPC_CAPABLE: CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE [old new],
        RANGE_START_ADDR: CU_POINTER_ATTRIBUTE_RANGE_START_ADDR [old new],
        RANGE_SIZE: CU_POINTER_ATTRIBUTE_RANGE_SIZE [old new],
        MAPPED: CU_POINTER_ATTRIBUTE_MAPPED [old new],
        ALLOWED_HANDLE_TYPES: CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES [old new],
        IS_GPU_DIRECT_RDMA_CAPABLE: CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE [new],
        ACCESS_FLAGS: CU_POINTER_ATTRIBUTE_ACCESS_FLAGS [new],
        MAPPING_SIZE: CU_POINTER_ATTRIBUTE_MAPPING_SIZE [new],
        MAPPING_BASE_ADDR: CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR [new],
        MEMORY_BLOCK_ID: CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID [new],
    }
}

// 919 is of CUDA 13.4: neither binding has it.
codes! {
    INVALID_VALUE: CUDA_ERROR_INVALID_VALUE [old new],
    OUT_OF_MEMORY: CUDA_ERROR_OUT_OF_MEMORY [old new],
    NOT_INITIALIZED: CUDA_ERROR_NOT_INITIALIZED [old new],
    DEINITIALIZED: CUDA_ERROR_DEINITIALIZED [old new],
    STUB_LIBRARY: CUDA_ERROR_STUB_LIBRARY [new],
    CALL_REQUIRES_NEWER_DRIVER: CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER [new],
    DEVICE_UNAVAILABLE: CUDA_ERROR_DEVICE_UNAVAILABLE [new],
    NO_DEVICE: CUDA_ERROR_NO_DEVICE [old new],
    INVALID_DEVICE: CUDA_ERROR_INVALID_DEVICE [old new],
    INVALID_IMAGE: CUDA_ERROR_INVALID_IMAGE [old new],
    INVALID_CONTEXT: CUDA_ERROR_INVALID_CONTEXT [old new],
    MAP_FAILED: CUDA_ERROR_MAP_FAILED [old new],
    UNMAP_FAILED: CUDA_ERROR_UNMAP_FAILED [old new],
    ALREADY_MAPPED: CUDA_ERROR_ALREADY_MAPPED [old new],
    NOT_MAPPED: CUDA_ERROR_NOT_MAPPED [old new],
    PEER_ACCESS_UNSUPPORTED: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED [old new],
    INVALID_PTX: CUDA_ERROR_INVALID_PTX [old new],
    OPERATING_SYSTEM: CUDA_ERROR_OPERATING_SYSTEM [old new],
    INVALID_HANDLE: CUDA_ERROR_INVALID_HANDLE [old new],
    ILLEGAL_STATE: CUDA_ERROR_ILLEGAL_STATE [old new],
    LOSSY_QUERY: CUDA_ERROR_LOSSY_QUERY [new],
    NOT_FOUND: CUDA_ERROR_NOT_FOUND [old new],
    NOT_READY: CUDA_ERROR_NOT_READY [old new],
    ILLEGAL_ADDRESS: CUDA_ERROR_ILLEGAL_ADDRESS [old new],
    PEER_ACCESS_ALREADY_ENABLED: CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED [old new],
    PEER_ACCESS_NOT_ENABLED: CUDA_ERROR_PEER_ACCESS_NOT_ENABLED [old new],
    PRIMARY_CONTEXT_ACTIVE: CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE [old new],
    CONTEXT_IS_DESTROYED: CUDA_ERROR_CONTEXT_IS_DESTROYED [old new],
    TOO_MANY_PEERS: CUDA_ERROR_TOO_MANY_PEERS [old new],
    MISALIGNED_ADDRESS: CUDA_ERROR_MISALIGNED_ADDRESS [old new],
    LAUNCH_FAILED: CUDA_ERROR_LAUNCH_FAILED [old new],
    NOT_PERMITTED: CUDA_ERROR_NOT_PERMITTED [old new],
    NOT_SUPPORTED: CUDA_ERROR_NOT_SUPPORTED [old new],
    SYSTEM_NOT_READY: CUDA_ERROR_SYSTEM_NOT_READY [old new],
    SYSTEM_DRIVER_MISMATCH: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH [old new],
    COMPAT_NOT_SUPPORTED_ON_DEVICE: CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE [old new],
    STREAM_CAPTURE_UNSUPPORTED: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED [old new],
    STREAM_CAPTURE_INVALIDATED: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED [old new],
    STREAM_CAPTURE_MERGE: CUDA_ERROR_STREAM_CAPTURE_MERGE [old new],
    STREAM_CAPTURE_UNMATCHED: CUDA_ERROR_STREAM_CAPTURE_UNMATCHED [old new],
    STREAM_CAPTURE_UNJOINED: CUDA_ERROR_STREAM_CAPTURE_UNJOINED [old new],
    STREAM_CAPTURE_ISOLATION: CUDA_ERROR_STREAM_CAPTURE_ISOLATION [old new],
    STREAM_CAPTURE_IMPLICIT: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT [old new],
    CAPTURED_EVENT: CUDA_ERROR_CAPTURED_EVENT [old new],
    STREAM_CAPTURE_WRONG_THREAD: CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD [old new],
    TIMEOUT: CUDA_ERROR_TIMEOUT [old new],
    EXTERNAL_DEVICE: CUDA_ERROR_EXTERNAL_DEVICE [new],
    FABRIC_NOT_READY: CUDA_ERROR_FABRIC_NOT_READY [],
    UNKNOWN: CUDA_ERROR_UNKNOWN [old new],
}

/// The one that the binding of CUDA 13 has as a mask instead of an enum.
#[test]
fn handle_types_are_the_same() {
    use sys::CUmemAllocationHandleType as Kind;
    for (ours, theirs) in [
        (Kind::NONE, new::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE),
        (Kind::POSIX_FILE_DESCRIPTOR, new::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        (Kind::WIN32, new::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_WIN32),
        (Kind::WIN32_KMT, new::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_WIN32_KMT),
        (Kind::FABRIC, new::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC),
    ] {
        assert_eq!(ours.0, theirs.0);
    }
}

/// The names that lines of the form `NAME = VALUE,` give, each behind that of the block around it.
fn declared(source: &str) -> Vec<String> {
    let mut block = "";
    let mut names = Vec::new();
    for line in source.lines().map(str::trim) {
        if let Some((head, _)) = line.split_once("(u32) {") {
            block = head;
        } else if let Some((name, value)) = line.strip_suffix(',').and_then(|line| line.split_once(" = "))
            && value.parse::<u32>().is_ok()
        {
            names.push(if block.is_empty() { name.to_owned() } else { format!("{block}::{name}") });
        }
    }
    names
}

/// The lists above leave nothing out.
#[test]
fn every_number_is_compared() {
    let numbers = declared(include_str!("../../src/sys/mod.rs"));
    let codes = declared(include_str!("../../src/sys/codes.rs"));
    assert!(numbers.len() > 80 && codes.len() > 40, "{} numbers and {} codes found", numbers.len(), codes.len());
    let missing: Vec<_> = numbers.iter().filter(|name| !NUMBERS.contains(&name.as_str())).collect();
    assert!(missing.is_empty(), "not compared: {missing:?}");
    let missing: Vec<_> = codes.iter().filter(|name| !CODES.contains(&name.as_str())).collect();
    assert!(missing.is_empty(), "not compared: {missing:?}");
}

#[test]
fn stream_tokens_are_one_and_two() {
    assert_eq!(sys::CUstream::LEGACY.0.addr(), 1);
    assert_eq!(sys::CUstream::PER_THREAD.0.addr(), 2);
}
