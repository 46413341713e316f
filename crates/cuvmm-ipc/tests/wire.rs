//! The wire format: whatever is sent is understood, whatever is not ours is refused, and no bytes panic.

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemFabricHandle, CUuuid};
use cuvmm_ipc::wire::{self, Preamble, Refusal, Reply, WireError};
use cuvmm_ipc::{BufferId, HostId, InvalidMetadata, Location, Metadata};
use proptest::prelude::*;

fn locations() -> impl Strategy<Value = Option<Location>> {
    prop_oneof![
        Just(None),
        any::<[u8; 16]>().prop_map(|bytes| Some(Location::Device { uuid: CUuuid { bytes } })),
        any::<i32>().prop_map(|node| Some(Location::HostNuma { node })),
    ]
}

prop_compose! {
    /// Sizes that fit each other, and sizes that don't.
    fn any_sizes()(sizes in prop::collection::vec(prop_oneof![9 => 1..1usize << 40, 1 => any::<usize>()], 0..40),
                   share in 0.0..1.2f64) -> (Vec<usize>, usize) {
        let sum = sizes.iter().fold(0usize, |sum, size| sum.saturating_add(*size));
        (sizes, (sum as f64 * share) as usize)
    }
}

prop_compose! {
    fn any_metadata()((sizes, size) in any_sizes(), kind in any::<u32>(), location in locations(),
                      id in any::<Option<([u8; 16], u64)>>(), host in any::<Option<[u8; 16]>>()) -> Metadata {
        let mut metadata = Metadata::new(sizes);
        metadata.size = size;
        metadata.handle_kind = CUmemAllocationHandleType(kind);
        metadata.location = location;
        metadata.id = id.and_then(|(family, generation)| BufferId::new(family, generation));
        metadata.host = host.and_then(HostId::new);
        metadata
    }
}

fn example() -> Metadata {
    let mut metadata = Metadata::new(vec![0x20_0000, 0x40_0000]);
    metadata.size = 0x50_0000;
    metadata.location = Some(Location::Device { uuid: CUuuid { bytes: *b"device's uuid 16" } });
    metadata.id = BufferId::new(*b"random bits (16)", 0x0102_0304_0506_0708);
    metadata.host = HostId::new(*b"boot id 16 bytes");
    metadata
}

/// The example of docs/wire-format.md.
const EXAMPLE: &[u8; 112] = b"CUVM\x01\0\0\0\x70\0\0\0\x01\0\0\0\x01\0\0\0\0\0\0\0device's uuid 16random bits (16)\
    \x08\x07\x06\x05\x04\x03\x02\x01boot id 16 bytes\0\0\x50\0\0\0\0\0\x02\0\0\0\0\0\0\0\
    \0\0\x20\0\0\0\0\0\0\0\x40\0\0\0\0\0";

#[test]
fn the_bytes_are_those_of_the_document() {
    assert_eq!(wire::encode(&example()).unwrap(), EXAMPLE);
    assert_eq!(wire::decode(EXAMPLE).unwrap(), example());
    assert_eq!(wire::encode_handles(2), [2, 0, 0, 0]);
    assert_eq!(Reply::More { handles: 253 }.encode(), [1, 0, 253, 0, 0, 0, 0, 0]);
    assert_eq!(Reply::Accepted.encode(), [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Reply::Refused { reason: Refusal::DRIVER, detail: 999 }.encode(), [3, 0, 10, 0, 231, 3, 0, 0]);
}

#[test]
fn a_changed_byte_that_matters_is_refused() {
    let check = |offset: usize, value: u8, expect: WireError| {
        let mut bytes = *EXAMPLE;
        bytes[offset] = value;
        assert_eq!(wire::decode(&bytes), Err(expect), "offset {offset}");
    };
    check(0, b'X', WireError::Magic { found: *b"XUVM" });
    check(4, 2, WireError::Version { found: 2 });
    check(6, 1, WireError::NotZero { offset: 6 });
    check(7, 1, WireError::NotZero { offset: 6 });
    check(8, 0x71, WireError::HeaderLength { said: 0x71, chunks: 2, needed: 0x70 });
    check(16, 9, WireError::LocationType { found: 9 });
    check(16, 2, WireError::LocationType { found: 2 });
    check(16, 0, WireError::NotZero { offset: 24 });
    check(16, 3, WireError::NotZero { offset: 24 });
    check(20, 1, WireError::NotZero { offset: 20 });
    check(88, 1, WireError::HeaderLength { said: 0x70, chunks: 1, needed: 0x68 });
    check(92, 1, WireError::NotZero { offset: 92 });
    check(95, 1, WireError::NotZero { offset: 92 });
    check(83, 1, WireError::Metadata(InvalidMetadata::Size { size: 0x150_0000, sum: 0x60_0000 }));
    check(98, 0, WireError::Metadata(InvalidMetadata::EmptyChunk { chunk: 0 }));
}

#[test]
fn an_id_that_is_not_told_has_no_generation() {
    let mut bytes = *EXAMPLE;
    bytes[40..56].fill(0);
    assert_eq!(wire::decode(&bytes), Err(WireError::NotZero { offset: 56 }));
    bytes[56..64].fill(0);
    assert_eq!(wire::decode(&bytes).unwrap().id, None);
}

#[test]
fn more_chunks_than_there_can_be_are_refused_before_they_are_looked_for() {
    let mut bytes = *EXAMPLE;
    bytes[88..92].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = wire::decode(&bytes).unwrap_err();
    assert!(matches!(error, WireError::HeaderLength { chunks: u32::MAX, .. }), "{error}");
    // One that says so consistently has the length of a header that nobody sends.
    let chunks: u32 = (u32::MAX - 96) / 8;
    bytes[88..92].copy_from_slice(&chunks.to_le_bytes());
    bytes[8..12].copy_from_slice(&(96 + 8 * chunks).to_le_bytes());
    assert!(matches!(wire::decode(&bytes), Err(WireError::Length { .. })));
}

#[test]
fn sums_that_overflow_are_refused() {
    let mut metadata = Metadata::new(vec![1, 2]);
    metadata.size = 1;
    let mut bytes = wire::encode(&metadata).unwrap();
    bytes[96..104].fill(0xff);
    assert_eq!(wire::decode(&bytes), Err(WireError::Metadata(InvalidMetadata::SumOverflow { chunk: 1 })));
}

#[test]
fn every_reply_that_is_not_ours_is_refused() {
    let check = |bytes: [u8; 8], expect: WireError| assert_eq!(Reply::decode(&bytes), Err(expect), "{bytes:?}");
    check([0; 8], WireError::Reply { found: 0 });
    check([4, 0, 0, 0, 0, 0, 0, 0], WireError::Reply { found: 4 });
    check([2, 1, 0, 0, 0, 0, 0, 0], WireError::NotZero { offset: 1 });
    check([2, 0, 1, 0, 0, 0, 0, 0], WireError::NotZero { offset: 2 });
    check([1, 0, 1, 0, 1, 0, 0, 0], WireError::NotZero { offset: 4 });
    check([1, 0, 0, 0, 0, 0, 0, 0], WireError::Handles { found: 0 });
    check([1, 0, 254, 0, 0, 0, 0, 0], WireError::Handles { found: 254 });
    assert_eq!(wire::decode_handles(&[254, 0, 0, 0]), Err(WireError::Handles { found: 254 }));
    assert_eq!(wire::decode_handles(&[253, 0, 0, 0]), Ok(253));
}

#[test]
fn fabric_handles_follow_their_number() {
    let handles = [b'a', b'b'].map(|byte| CUmemFabricHandle { data: [byte; 64] });
    let message = wire::encode_fabric_handles(&handles);
    assert_eq!(message, [&[2, 0, 0, 0][..], &[b'a'; 64], &[b'b'; 64]].concat());
    assert_eq!(wire::decode_fabric_handles(&message).unwrap(), handles);
    assert_eq!(wire::decode_fabric_handles(&[0; 4]), Ok(Vec::new()), "the sender gives up");
    let check = |bytes: &[u8], expect| assert_eq!(wire::decode_fabric_handles(bytes), Err(expect), "{bytes:?}");
    check(&[2, 0, 0], WireError::Length { found: 3, expected: 4 });
    check(&[1, 0, 0, 0], WireError::Length { found: 4, expected: 68 });
    check(&[254, 0, 0, 0], WireError::Handles { found: 254 });
    check(&[&message[..], &[0]].concat(), WireError::Length { found: 133, expected: 132 });
}

proptest! {
    #[test]
    fn a_message_of_fabric_handles_reads_as_it_is_written(
        mut bytes in prop::collection::vec(any::<u8>(), 0..400),
        count in prop::option::of(0..7u8),
    ) {
        if let (Some(count), [first, second, third, fourth, ..]) = (count, &mut bytes[..]) {
            (*first, *second, *third, *fourth) = (count, 0, 0, 0);
            bytes.resize(4 + 64 * usize::from(count), 7);
        }
        match wire::decode_fabric_handles(&bytes) {
            Ok(handles) => prop_assert_eq!(wire::encode_fabric_handles(&handles), bytes),
            Err(error) => prop_assert!(count.is_none() || bytes.len() < 4, "{}", error),
        }
    }

    #[test]
    fn what_fits_comes_back_and_what_does_not_is_never_sent(metadata in any_metadata()) {
        match (metadata.check(), wire::encode(&metadata)) {
            (Ok(_), Ok(bytes)) => prop_assert_eq!(wire::decode(&bytes), Ok(metadata)),
            (Err(invalid), Err(error)) => prop_assert_eq!(invalid, error),
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(metadata) = wire::decode(&bytes) {
            prop_assert_eq!(wire::encode(&metadata).unwrap(), bytes);
        }
    }

    #[test]
    fn a_damaged_header_is_refused_or_reads_as_it_is_written(
        metadata in any_metadata(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let Ok(mut bytes) = wire::encode(&metadata) else { return Ok(()) };
        for (index, value) in damage {
            let index = index.index(bytes.len());
            bytes[index] = value;
        }
        if let Ok(metadata) = wire::decode(&bytes) {
            prop_assert_eq!(wire::encode(&metadata).unwrap(), bytes);
        }
    }

    #[test]
    fn every_truncation_is_refused(metadata in any_metadata(), more in 1..20usize) {
        let Ok(mut bytes) = wire::encode(&metadata) else { return Ok(()) };
        for length in 0..bytes.len() {
            let refused = matches!(wire::decode(&bytes[..length]), Err(WireError::Length { .. }));
            prop_assert!(refused, "length {}", length);
        }
        bytes.resize(bytes.len() + more, 0);
        let refused = matches!(wire::decode(&bytes), Err(WireError::Length { .. }));
        prop_assert!(refused);
    }

    #[test]
    fn a_preamble_never_panics(bytes in any::<[u8; 96]>(), magic in any::<bool>(), sizes in any::<Vec<u8>>()) {
        let mut bytes = bytes;
        if magic {
            bytes[..8].copy_from_slice(&EXAMPLE[..8]);
        }
        if let Ok(preamble) = Preamble::decode(&bytes) {
            let _ = preamble.with_sizes(&sizes);
        }
    }

    #[test]
    fn replies_read_as_they_are_written(bytes in any::<[u8; 8]>()) {
        if let Ok(reply) = Reply::decode(&bytes) {
            prop_assert_eq!(reply.encode(), bytes);
        }
    }
}
