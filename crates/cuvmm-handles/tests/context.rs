//! Shares of primary contexts: taken and given back once, and current no longer than a call needs.

mod support;

use cuvmm_driver::Call;
use cuvmm_driver::sys::CUresult;
use cuvmm_handles::PrimaryContext;
use cuvmm_sim::When;
use support::{Bench, CODES};

#[test]
fn a_share_is_given_back_once_and_the_context_goes_with_the_last() {
    for bench in Bench::presets() {
        let device = bench.driver.device(0).unwrap();
        let [closed, dropped] = [(); 2].map(|()| PrimaryContext::retain(&device).unwrap());
        assert_eq!((closed.device(), closed.as_raw()), (&device, dropped.as_raw()));
        assert!(bench.driver.ctx_get_current().unwrap().is_null(), "it is not made current");
        closed.release().unwrap();
        assert!(device.primary_ctx_is_active().unwrap());
        drop(dropped);
        assert!(!device.primary_ctx_is_active().unwrap());
        assert_eq!(bench.count(Call::cuDevicePrimaryCtxRelease), 2);
        bench.assert_clean();
    }
}

#[test]
fn a_share_that_is_not_given_back_is_told_once_and_counted_once() {
    for code in CODES {
        let bench = Bench::small();
        let device = bench.driver.device(0).unwrap();
        let [closed, dropped] = [(); 2].map(|()| PrimaryContext::retain(&device).unwrap());
        bench.faults.fail(Call::cuDevicePrimaryCtxRelease, 1, code, When::Before);
        bench.faults.fail(Call::cuDevicePrimaryCtxRelease, 2, code, When::Before);
        let error = closed.release().unwrap_err();
        assert_eq!((error.call(), error.code()), (Some(Call::cuDevicePrimaryCtxRelease), Some(code)));
        assert_eq!(bench.stranded(), [0, 0, 0, 1]);
        drop(dropped);
        assert_eq!((bench.stranded(), bench.simulator.live().contexts), ([0, 0, 0, 2], 2));
    }
}

#[test]
fn after_the_driver_has_shut_down_letting_go_is_quiet() {
    let bench = Bench::small();
    let device = bench.driver.device(0).unwrap();
    let [closed, dropped] = [(); 2].map(|()| PrimaryContext::retain(&device).unwrap());
    bench.simulator.shut_down();
    assert_eq!(closed.release().unwrap_err().code(), Some(CUresult::DEINITIALIZED));
    drop(dropped);
    assert_eq!(bench.stranded(), [0; 4]);
}

/// Each call around an export fails: the context is current and held no longer, but for what that call would have
/// undone, and what is current is not given back.
#[test]
fn a_failure_around_the_export_of_a_dma_buf_strands_that_alone() {
    for (call, exports, left) in [
        (Call::cuDevicePrimaryCtxRetain, false, (0, false)),
        (Call::cuCtxPushCurrent, false, (0, false)),
        (Call::cuMemGetHandleForAddressRange, false, (0, false)),
        (Call::cuCtxPopCurrent, true, (1, true)),
        (Call::cuDevicePrimaryCtxRelease, true, (1, false)),
    ] {
        for code in CODES {
            for bench in Bench::presets() {
                let mapping = bench.mapping();
                bench.faults.fail(call, 1, code, When::Before);
                match mapping.export_dma_buf() {
                    Ok(_) => assert!(exports, "{call}"),
                    Err(error) => assert_eq!((error.call(), error.code(), exports), (Some(call), Some(code), false)),
                }
                let is_current = !bench.driver.ctx_get_current().unwrap().is_null();
                assert_eq!((bench.simulator.live().contexts, is_current), left, "{call}");
                assert_eq!(bench.stranded(), [0, 0, 0, left.0]);
                mapping.close().unwrap();
                assert_eq!(bench.simulator.violations(), []);
            }
        }
    }
}
