//! Who may touch the memory: the own device, its peers, and nobody.

use std::sync::{Arc, Mutex};

use cuvmm_driver::sys::{CUmemAccessDesc, CUmemLocation, CUuuid};
use cuvmm_driver::{CUresult, Call, Device};
use cuvmm_resource::{Access, Error, Options, Outcome, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{DeviceModel, Hints, Machine, When};

use crate::support::{Bench, G};

const MIB: usize = 1 << 20;

fn device(bench: &Bench, ordinal: i32) -> Device {
    bench.driver.device(ordinal).unwrap()
}

fn desc(ordinal: i32, access: Access) -> CUmemAccessDesc {
    CUmemAccessDesc { location: CUmemLocation::device(ordinal), flags: access.as_driver() }
}

/// What the driver says that some device may do with the memory there.
fn access_of(bench: &Bench, buffer: &VirtualMemoryBuffer, ordinal: i32) -> Vec<Access> {
    let asked = |address| bench.driver.mem_get_access(CUmemLocation::device(ordinal), address).unwrap();
    let all = [Access::None, Access::Read, Access::ReadWrite];
    let access = |address| all.into_iter().find(|access| access.as_driver() == asked(address)).unwrap();
    buffer.chunks().iter().map(|chunk| access(chunk.address)).collect()
}

/// The number of descriptors in each grant from now on.
fn grants(bench: &Bench) -> Arc<Mutex<Vec<u64>>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let grants = Arc::clone(&seen);
    let see = move |arguments: &[u64]| {
        grants.lock().unwrap().push(arguments[3]);
        false
    };
    bench.faults.fail_when(Call::cuMemSetAccess, see, CUresult::UNKNOWN, When::Before);
    seen
}

#[test]
fn each_chunk_is_granted_to_all_in_one_call() {
    let uuid = |index| DeviceModel::h200(index).uuid;
    let all: Vec<CUuuid> = (0..9).map(uuid).collect();
    let mut machine = Machine::small();
    machine.devices = (0..9).map(|index| DeviceModel { peers: all.clone(), ..DeviceModel::h200(index) }).collect();
    let bench = Bench::new(machine);
    let peers: Vec<Device> = (1..9).map(|ordinal| device(&bench, ordinal)).collect();
    let resource = bench.resource(Options::new().peers(&peers, Access::ReadWrite).max_chunk(G));
    let grants = grants(&bench);
    let buffer = resource.allocate(4 * G).unwrap();
    assert_eq!(*grants.lock().unwrap(), [9; 4]);
    for ordinal in 0..9 {
        assert_eq!(access_of(&bench, &buffer, ordinal), [Access::ReadWrite; 4]);
    }
    drop(buffer);
    bench.assert_clean();
}

#[test]
fn a_peer_out_of_reach_is_refused_before_anything_is_made() {
    let bench = Bench::new(Machine::odd());
    let [one, two] = [1, 2].map(|ordinal| device(&bench, ordinal));
    for access in [Access::Read, Access::ReadWrite] {
        let refused = VirtualMemoryResource::new(&bench.device(), Options::new().peers([&one, &two], access));
        assert_eq!(refused.map(drop), Err(Error::PeerUnreachable { from: 2, to: 0 }));
        // Nor does device 0 reach that one.
        let refused = VirtualMemoryResource::new(&two, Options::new().peer(&bench.device(), access));
        assert_eq!(refused.map(drop), Err(Error::PeerUnreachable { from: 0, to: 2 }));
    }
    assert!(!bench.simulator.calls().contains(&Call::cuMemCreate));
    bench.assert_clean();
    // Who may do nothing need not reach it.
    let resource = bench.resource(Options::new().peer(&two, Access::None));
    assert_eq!(resource.allocate(1).unwrap().chunks()[0].access, [desc(0, Access::ReadWrite)]);
}

#[test]
fn who_is_named_twice_and_the_own_device_count_once() {
    let bench = Bench::new(Machine::odd());
    let [own, one] = [0, 1].map(|ordinal| device(&bench, ordinal));
    let own_and_one = |access| vec![desc(0, Access::ReadWrite), desc(1, access)];
    let mut directly = Options::new();
    directly.peers = vec![(one.clone(), Access::ReadWrite), (own.clone(), Access::Read), (one.clone(), Access::Read)];
    for (options, access) in [
        (Options::new().peers([&one, &one, &own], Access::Read), own_and_one(Access::Read)),
        (Options::new().peer(&one, Access::Read).peer(&one, Access::ReadWrite), own_and_one(Access::ReadWrite)),
        (Options::new().peer(&own, Access::None), vec![desc(0, Access::ReadWrite)]),
        (Options::new().peer(&one, Access::Read).peer(&one, Access::None), vec![desc(0, Access::ReadWrite)]),
        (directly, own_and_one(Access::Read)),
    ] {
        let resource = bench.resource(options);
        let grants = grants(&bench);
        let buffer = resource.allocate(1).unwrap();
        assert_eq!(buffer.chunks()[0].access, access);
        assert_eq!(*grants.lock().unwrap(), [access.len() as u64]);
        bench.faults.clear();
    }
    bench.assert_clean();
}

#[test]
fn a_peer_of_another_driver_is_refused_before_any_call() {
    let [bench, other] = [Bench::small(), Bench::small()];
    let refused = VirtualMemoryResource::new(&bench.device(), Options::new().peer(&other.device(), Access::Read));
    assert_eq!(refused.map(drop), Err(Error::Driver(cuvmm_driver::Error::DifferentDrivers)));
    bench.assert_no_call();
}

#[test]
fn the_own_device_may_do_what_it_was_given() {
    let bench = Bench::new(Machine::odd());
    let one = device(&bench, 1);
    for own in [Access::None, Access::Read, Access::ReadWrite] {
        for peer in [Access::None, Access::Read, Access::ReadWrite] {
            let resource = bench.resource(Options::new().own_access(own).peer(&one, peer));
            let buffer = resource.allocate(1).unwrap();
            assert_eq!((access_of(&bench, &buffer, 0), access_of(&bench, &buffer, 1)), (vec![own], vec![peer]));
            let expected = own != Access::None || peer != Access::None;
            assert_eq!((resource.is_device_accessible(), resource.is_host_accessible()), (expected, false));
            if own == Access::ReadWrite {
                drop(resource.allocate_zeroed(1).unwrap());
            } else {
                bench.simulator.clear_calls();
                assert_eq!(resource.allocate_zeroed(1).map(drop), Err(Error::NotWritable));
                assert_eq!(resource.allocate_zeroed_with_capacity(0, 1).map(drop), Err(Error::NotWritable));
                bench.assert_no_call();
            }
        }
    }
    bench.assert_clean();
}

#[test]
fn memory_that_nobody_may_touch_is_granted_to_nobody() {
    for hints in [Hints::Granted, Hints::Refused(CUresult::INVALID_VALUE)] {
        let bench = Bench::new(Machine::h200_pair().hints(hints));
        let resource = bench.resource(Options::new().own_access(Access::None));
        assert!(!resource.is_device_accessible());
        let buffer = resource.allocate(1).unwrap();
        let grown = buffer.grow(40 * MIB).unwrap();
        let expected = if hints == Hints::Granted { Outcome::InPlace } else { Outcome::Moved };
        assert_eq!(grown.outcome(), Some(expected));
        assert!(grown.chunks().iter().all(|chunk| chunk.access.is_empty()));
        assert_eq!(access_of(&bench, &grown, 0), vec![Access::None; grown.chunks().len()]);
        buffer.close().unwrap();
        grown.truncate_into(1).unwrap().close().unwrap();
        assert_eq!(bench.count(Call::cuMemSetAccess), 0);
        bench.assert_clean();
    }
}

/// The access of every chunk, as it was made and as the driver has it.
#[track_caller]
fn require(bench: &Bench, buffer: &VirtualMemoryBuffer, own: Access, peer: Access) {
    let chunks = buffer.chunks();
    assert!(chunks.iter().all(|chunk| chunk.access == [desc(0, own), desc(1, peer)]));
    assert_eq!(access_of(bench, buffer, 0), vec![own; chunks.len()]);
    assert_eq!(access_of(bench, buffer, 1), vec![peer; chunks.len()]);
}

#[test]
fn access_survives_growing_moving_cutting_and_failing() {
    for hints in [Hints::Granted, Hints::Elsewhere] {
        let bench = Bench::new(Machine::odd().hints(hints));
        let (own, peer) = (Access::Read, Access::ReadWrite);
        let resource = bench.resource(Options::new().own_access(own).peer(&device(&bench, 1), peer));
        let buffer = resource.allocate(MIB).unwrap();
        require(&bench, &buffer, own, peer);
        let in_place = buffer.grow(20 * MIB).unwrap();
        let moved = buffer.grow(20 * MIB).unwrap();
        let outcomes = (in_place.outcome(), moved.outcome());
        assert_eq!(outcomes, (Some(Outcome::InPlace), Some(Outcome::Moved)));
        let larger = moved.grow(100 * MIB).unwrap();
        let before = bench.simulator.live();
        // It moves, and so maps and grants more than the one chunk that is made.
        for (call, times) in [(Call::cuMemCreate, 1), (Call::cuMemMap, 2), (Call::cuMemSetAccess, 2)] {
            for nth in 1..=times {
                bench.faults.fail(call, nth, CUresult::UNKNOWN, When::Before);
                let error = buffer.grow(300 * MIB).map(drop).unwrap_err();
                assert_eq!((error.call(), error.code()), (Some(call), Some(CUresult::UNKNOWN)));
                assert_eq!(bench.simulator.live(), before);
                for buffer in [&buffer, &in_place, &moved, &larger] {
                    require(&bench, buffer, own, peer);
                }
            }
        }
        let shorter = larger.truncate_into(20 * MIB).unwrap();
        require(&bench, &shorter, own, peer);
        drop((buffer, in_place, moved));
        require(&bench, &shorter, own, peer);
        drop(shorter);
        bench.assert_clean();
    }
}
