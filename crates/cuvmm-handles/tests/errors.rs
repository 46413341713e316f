//! What errors say, and what they answer.

use cuvmm_driver::sys::{CUdeviceptr, CUmemAllocationHandleType, CUmemLocation, CUmemLocationType, CUresult};
use cuvmm_driver::{Call, Error as DriverError};
use cuvmm_handles::Error;

#[test]
fn each_error_says_what_and_how_much() {
    let call = || DriverError::Call {
        call: Call::cuMemMap,
        code: CUresult(2),
        name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
        text: "out of memory".into(),
    };
    let grant = |location| Error::Grant { address: CUdeviceptr(0x40_0000), bytes: 0x20_0000, location, error: call() };
    let (none, posix) = (CUmemAllocationHandleType::NONE, CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR);
    let odd = Call::cuMemGetAllocationGranularity;
    for (error, text, call, code) in [
        (
            call().into(),
            "cuMemMap failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory",
            Some(Call::cuMemMap),
            Some(CUresult(2)),
        ),
        (
            Error::Reserve { bytes: 0x20_0000, alignment: 0, hint: CUdeviceptr(0), error: call() },
            "cuMemMap failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x200000 bytes of addresses",
            Some(Call::cuMemMap),
            Some(CUresult(2)),
        ),
        (
            Error::Reserve { bytes: 0x20_0000, alignment: 0x40_0000, hint: CUdeviceptr(0), error: call() },
            "cuMemMap failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x200000 bytes of addresses at a multiple of 0x400000",
            Some(Call::cuMemMap),
            Some(CUresult(2)),
        ),
        (
            Error::Create { bytes: 0x20_0000, error: call() },
            "cuMemMap failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x200000 bytes",
            Some(Call::cuMemMap),
            Some(CUresult(2)),
        ),
        (
            Error::Map { address: CUdeviceptr(0x40_0000), bytes: 0x20_0000, error: call() },
            "cuMemMap failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x200000 bytes at 0x400000",
            Some(Call::cuMemMap),
            Some(CUresult(2)),
        ),
        (
            grant(None),
            "cuMemMap failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x200000 bytes at 0x400000",
            Some(Call::cuMemMap),
            Some(CUresult(2)),
        ),
        (
            grant(Some(CUmemLocation::device(3))),
            "cuMemMap failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x200000 bytes at 0x400000, to device 3",
            Some(Call::cuMemMap),
            Some(CUresult(2)),
        ),
        (
            grant(Some(CUmemLocation::host())),
            "cuMemMap failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x200000 bytes at 0x400000, to the host",
            Some(Call::cuMemMap),
            Some(CUresult(2)),
        ),
        (
            grant(Some(CUmemLocation::host_numa(1))),
            "cuMemMap failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x200000 bytes at 0x400000, to NUMA \
             node 1 of the host",
            Some(Call::cuMemMap),
            Some(CUresult(2)),
        ),
        (
            grant(Some(CUmemLocation { location_type: CUmemLocationType(77), id: 5 })),
            "cuMemMap failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x200000 bytes at 0x400000, to \
             location 5 of type 77",
            Some(Call::cuMemMap),
            Some(CUresult(2)),
        ),
        (DriverError::DifferentDrivers.into(), "values of two different drivers in one operation", None, None),
        (
            Error::SizeOverflow { bytes: 7, granularity: 4096 },
            "7 bytes at a granularity of 4096 overflow the address space",
            None,
            None,
        ),
        (
            Error::NotGranular { bytes: 7, granularity: 4096 },
            "7 bytes are not a positive multiple of the granularity, 4096",
            None,
            None,
        ),
        (Error::Alignment { alignment: 3 }, "an alignment of 3 is no power of two", None, None),
        (
            Error::OutOfBounds { offset: 4096, size: 8192, reserved: 4096 },
            "8192 bytes at offset 4096 do not lie within a reservation of 4096",
            None,
            None,
        ),
        (
            Error::AlreadyMapped { offset: 4096, size: 8192 },
            "8192 bytes at offset 4096 of the reservation are taken",
            None,
            None,
        ),
        (
            Error::AddressUnavailable { wanted: CUdeviceptr(0x20_0000), got: CUdeviceptr(0x40_0000) },
            "address 0x200000 can't be had: the driver gave 0x400000",
            None,
            None,
        ),
        (
            Error::NotExportable { has: none, wanted: posix },
            "memory made for handle kinds NONE can't be exported as kind POSIX_FILE_DESCRIPTOR",
            None,
            None,
        ),
        (Error::Imported, "imported memory can't be exported again: forward the handle that it came by", None, None),
        (Error::Duplicate { errno: 24 }, "failed to duplicate a file descriptor: errno 24", None, None),
        (
            Error::UnexpectedAnswer { call: odd, value: 3 },
            "cuMemGetAllocationGranularity answered 3, which its manual rules out",
            Some(odd),
            None,
        ),
    ] {
        assert_eq!((error.to_string().as_str(), error.call(), error.code()), (text, call, code));
    }
}
