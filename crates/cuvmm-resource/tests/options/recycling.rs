//! What a resource keeps, beside what else it was made with.

use std::sync::mpsc::channel;
use std::time::Duration;

use cuvmm_driver::Call;
use cuvmm_resource::{
    Error, GrowOptions, GrowthPolicy, HandleKind, Location, OnDrop, Options, Recycling, Release, Request,
    VirtualMemoryResource,
};
use cuvmm_sim::Machine;

use crate::support::work::drain;
use crate::support::{Bench, G, R};

const RECYCLING: Recycling = Recycling::up_to(64 * G);

#[test]
fn what_is_kept_is_allocated_and_grown_by() {
    for bench in Bench::presets() {
        let options = Options::new().release(Release::Caller).recycling(RECYCLING);
        for options in [options.clone(), options.clone().max_chunk(G), options.growth(GrowthPolicy::Step(2 * G))] {
            let resource = bench.resource(options);
            bench.simulator.clear_calls();
            let mut made = None;
            for _ in 0..5 {
                let buffer = resource.allocate_with_capacity(G, R).unwrap().grow_into(3 * G).unwrap();
                let options = GrowOptions::new().zeroed().in_place();
                let buffer = buffer.grow_into_with(5 * G, &options).unwrap();
                assert_eq!(bench.bytes_of(&buffer)[3 * G..], vec![0; 2 * G]);
                buffer.close().unwrap();
                // All that the first one made does for the others.
                let creates = bench.count(Call::cuMemCreate);
                assert_eq!(*made.get_or_insert(creates), creates);
            }
            let statistics = resource.statistics();
            assert_eq!((statistics.kept.now, statistics.trimmed), (5 * G, 0));
            drop(resource);
            bench.wait_until(|bench| bench.left()[2] == 0);
        }
        bench.assert_clean_soon();
    }
}

#[test]
fn what_can_not_keep_anything_is_refused_before_a_chunk_is_made() {
    let bench = Bench::small();
    for (recycling, error) in [
        (Recycling::up_to(0), Error::Recycling { reason: "a budget of 0 bytes" }),
        (Recycling::up_to(G - 1), Error::RecyclingBudget { bytes: G - 1, granularity: G }),
        (RECYCLING.for_at_most(Duration::ZERO), Error::Recycling { reason: "an age of 0" }),
    ] {
        let refused = VirtualMemoryResource::new(&bench.device(), Options::new().recycling(recycling));
        assert_eq!(refused.err(), Some(error));
    }
    assert_eq!(bench.count(Call::cuMemCreate), 0);
}

#[test]
fn what_others_may_have_registered_is_refused_unless_that_is_allowed_whatever_the_machine_has() {
    // The one has no fabric handles.
    for bench in [Machine::small(), Machine::small().with_imex()].map(Bench::new) {
        for options in [
            Options::new().handle_kind(HandleKind::PosixFd),
            Options::new().handle_kind(HandleKind::PosixFd).location(Location::HostNuma(0)),
            Options::new().handle_kind(HandleKind::Fabric),
            Options::new().handle_kind_or(HandleKind::Fabric, HandleKind::None),
            Options::new().rdma(Request::IfSupported),
            Options::new().rdma(Request::Required),
        ] {
            bench.simulator.clear_calls();
            let refused = VirtualMemoryResource::new(&bench.device(), options.clone().recycling(RECYCLING));
            let told = refused.unwrap_err().to_string();
            assert!(told.starts_with("recycling can't have memory with a handle kind or RDMA"), "{told}");
            bench.assert_no_call();
            // It is refused for what the machine lacks alone.
            let allowed = VirtualMemoryResource::new(&bench.device(), options.clone().recycling(RECYCLING.shareable()));
            let without = VirtualMemoryResource::new(&bench.device(), options);
            assert_eq!(allowed.as_ref().err(), without.as_ref().err());
            assert!(allowed.is_ok_and(|resource| resource.is_recycling()) == without.is_ok());
        }
    }
}

#[test]
fn dropping_a_resource_makes_no_call_whatever_it_keeps() {
    let bench = Bench::small();
    let resource = bench.resource(Options::new().release(Release::Caller).recycling(RECYCLING));
    resource.allocate(3 * G).unwrap().close().unwrap();
    let deferring = Options::new().release(Release::Caller).on_drop(OnDrop::Defer).recycling(RECYCLING);
    let deferring = bench.resource(deferring);
    drop(deferring.allocate(G).unwrap());
    drain(&deferring);
    assert_eq!([&resource, &deferring].map(|resource| resource.statistics().kept.now), [3 * G, G]);
    // The reaper is kept from its own calls until both are gone.
    let (begin, hold) = channel::<()>();
    bench.meanwhile.before_next(Call::cuMemRelease, move || _ = hold.recv());
    drop((resource, deferring));
    assert_eq!(bench.left()[2], 2);
    drop(begin);
    bench.assert_clean_soon();
}
