//! What errors say, and what they answer.

mod support;

use std::error::Error as _;

use cuvmm_driver::sys::{CUdeviceptr, CUmemLocation};
use cuvmm_driver::{CUresult, Call};
use cuvmm_resource::{Access, Error, HandleKind};
use cuvmm_sim::When;
use support::{Bench, G};

#[test]
fn each_error_says_what_and_how_much() {
    let call = cuvmm_driver::Error::Call {
        call: Call::cuMemCreate,
        code: CUresult(2),
        name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
        text: "out of memory".into(),
    };
    let told = "cuMemCreate failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory";
    let made = (Some(Call::cuMemCreate), Some(CUresult(2)));
    let exhausted = |alignment| Error::AddressSpaceExhausted { bytes: 0x200_0000, alignment, error: call.clone() };
    let unaligned = format!("{told}, for 0x2000000 bytes of addresses");
    let aligned = format!("{unaligned} at a multiple of 0x4000000");
    let refused = Error::HandleKindRefused { kind: HandleKind::Fabric, error: call.clone() };
    let kind = format!("memory of handle kind Fabric is refused here: {told}");
    for (error, text, answers) in [
        (exhausted(0), unaligned.as_str(), made),
        (exhausted(64 << 20), &aligned, made),
        (refused, &kind, made),
        (call.clone().into(), told, made),
        (cuvmm_handles::Error::from(call).into(), told, made),
        (Error::Unsupported { what: "this", ordinal: 3 }, "device 3 does not support this", (None, None)),
        (Error::Alignment { alignment: 3 }, "an alignment of 3 is no power of two", (None, None)),
        (
            Error::MaxChunk { bound: 0x1_0000, granularity: 0x20_0000 },
            "chunks of at most 0x10000 bytes can't be made at a granularity of 0x200000",
            (None, None),
        ),
        (Error::Recycling { reason: "an age of 0" }, "recycling can't have an age of 0", (None, None)),
        (
            Error::RecyclingBudget { bytes: 0x1_0000, granularity: 0x20_0000 },
            "recycling of at most 0x10000 bytes keeps nothing at a granularity of 0x200000",
            (None, None),
        ),
        (
            Error::OutOfBounds { offset: 1, bytes: 2, size: 3 },
            "2 bytes at offset 1 do not lie within a buffer of 3",
            (None, None),
        ),
        (Error::Chunks { size: 3, sum: 2 }, "a buffer of 3 bytes can't be made of chunks of 2", (None, None)),
        (Error::NotVmm { address: CUdeviceptr(16) }, "no virtual memory is mapped at 0x10", (None, None)),
        (
            Error::NotOneReservation {
                address: CUdeviceptr(16),
                size: 1,
                found_address: CUdeviceptr(0),
                found_size: 32,
            },
            "0x1 bytes at 0x10 are no reservation: there is one of 0x20 bytes at 0x0",
            (None, None),
        ),
        (
            Error::MappingAcross { address: CUdeviceptr(16), size: 32 },
            "the mapping of 0x20 bytes at 0x10 reaches across an end of the range",
            (None, None),
        ),
        (Error::MappedBehindHole { address: CUdeviceptr(16) }, "memory is mapped at 0x10, behind a hole", (None, None)),
        (
            Error::OtherLocation { address: CUdeviceptr(16), location: CUmemLocation::device(1) },
            "the memory at 0x10 is of device 1",
            (None, None),
        ),
        (
            Error::NotAccessible { needed: Access::Read },
            "the driver needs read access to the memory for this, which was not granted",
            (None, None),
        ),
        (
            Error::NotAccessible { needed: Access::ReadWrite },
            "the driver needs write access to the memory for this, which was not granted",
            (None, None),
        ),
        (Error::Forked, "called in a process that was forked from the one that started the driver", (None, None)),
        (Error::StreamCapturing, "the stream is capturing", (None, None)),
        (Error::NotCapturing, "the stream is not capturing", (None, None)),
        (Error::DeadlinePassed, "the work was not over by the deadline", (None, None)),
        (Error::StillPending { buffers: 3 }, "buffers that are gone still wait for work: 3", (None, None)),
        (Error::HostCallback, "called from a host function of the driver", (None, None)),
    ] {
        assert_eq!((error.to_string().as_str(), (error.call(), error.code())), (text, answers));
        assert!(error.source().is_none(), "who prints the causes too reads nothing twice: {error}");
    }
}

#[test]
fn a_refused_close_gives_the_buffer_and_a_failed_one_does_not() {
    let [bench, other] = [Bench::small(), Bench::small()];
    let buffer = bench.plain().allocate(G).unwrap();
    let theirs = cuvmm_resource::StreamRef::create(&other.device()).unwrap();
    let refused = buffer.close_on(&theirs).unwrap_err();
    assert_eq!(refused.to_string(), "the buffer was not closed");
    assert_eq!(refused.source().unwrap().to_string(), refused.error().to_string());
    let buffer = refused.into_buffer().unwrap();

    bench.faults.fail(Call::cuMemUnmap, 1, CUresult::UNKNOWN, When::Before);
    let failed = buffer.close().unwrap_err();
    assert_eq!(failed.to_string(), "the buffer was closed with an error");
    assert_eq!(failed.error().call(), Some(Call::cuMemUnmap));
    assert!(failed.into_buffer().is_none());

    let failed = bench.plain().allocate(G).unwrap().grow_into(usize::MAX).unwrap_err();
    assert_eq!(failed.to_string(), "the buffer was not resized");
    let overflow = cuvmm_handles::Error::SizeOverflow { bytes: usize::MAX, granularity: G };
    assert_eq!(failed.error(), &Error::Handles(overflow));
    assert_eq!(failed.into_buffer().size(), G);
}
