//! cudarc, a binding for Rust that is not ours, runs on the library: contexts, memory, copies, streams, events, graphs
//! and kernels, as far as the list covers what it calls.
//!
//! # Safety
//! Kernels are launched with the parameters that they declare, over memory that outlives them.
#![allow(unsafe_code)]

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use cuvmm_sim::kernels;

use crate::stand_in::{Folder, alone};

/// As many words as the tests use.
const WORDS: usize = 3 << 18;

/// Runs the body where cudarc finds the library, on devices with or without memory pools. There must be no violation.
fn on_the_library(test: &str, pools: bool, body: impl FnOnce()) {
    let folder = Folder::new();
    let attribute = format!("115={}", i32::from(pools));
    let environment =
        [("LD_LIBRARY_PATH", folder.path()), ("CUVMM_SIM_ATTRIBUTES", &attribute), ("CUVMM_SIM_LOG", "stderr")];
    if let Some(said) = alone(test, &environment, body) {
        assert!(said.contains("]: 0 violations; "), "{said}");
    }
}

fn words(seed: u32) -> Vec<u32> {
    (0..WORDS as u32).map(|index| index.wrapping_mul(2_654_435_761) ^ seed).collect()
}

#[test]
fn it_finds_the_device() {
    on_the_library("bindings::it_finds_the_device", false, || {
        let context = CudaContext::new(0).unwrap();
        assert_eq!(CudaContext::device_count().unwrap(), 1);
        assert_eq!(context.name().unwrap(), "Simulated H200");
        assert_eq!(context.compute_capability().unwrap(), (9, 0));
        assert_eq!(context.uuid().unwrap().bytes[..9].iter().map(|&byte| byte as u8).collect::<Vec<_>>(), b"cuvmm-sim");
        let (free, total) = context.mem_get_info().unwrap();
        assert!(free <= total && total == context.total_mem().unwrap());
    });
}

#[test]
fn it_copies_and_sets_memory_on_streams() {
    on_the_library("bindings::it_copies_and_sets_memory_on_streams", false, || {
        let context = CudaContext::new(0).unwrap();
        let first = context.new_stream().unwrap();
        let source = first.clone_htod(&words(1)).unwrap();
        let second = first.fork().unwrap();
        let mut target = second.alloc_zeros::<u32>(WORDS).unwrap();
        second.memcpy_dtod(&source, &mut target).unwrap();
        first.join(&second).unwrap();
        assert!(first.clone_dtoh(&target).unwrap() == words(1));
        first.memset_zeros(&mut target.slice_mut(..WORDS / 2)).unwrap();
        let seen = first.clone_dtoh(&target).unwrap();
        assert!(seen[..WORDS / 2].iter().all(|&word| word == 0) && seen[WORDS / 2..] == words(1)[WORDS / 2..]);
        let event = first.record_event(None).unwrap();
        event.synchronize().unwrap();
        assert!(event.is_complete());
        context.synchronize().unwrap();
    });
}

#[test]
fn it_loads_and_launches_kernels() {
    on_the_library("bindings::it_loads_and_launches_kernels", false, || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let module = context.load_module(Ptx::from_src(kernels::PTX.to_str().unwrap())).unwrap();
        let fill = module.load_function("fill").unwrap();
        let read = module.load_function("read").unwrap();
        let mut source = stream.alloc_zeros::<u32>(WORDS).unwrap();
        let mut target = stream.alloc_zeros::<u32>(WORDS).unwrap();
        let (value, count) = (0xC0FFEE_u32, WORDS as u64);
        let grid = LaunchConfig::for_num_elems(WORDS as u32);
        // SAFETY: both kernels stay within `count` words of what they are given.
        unsafe {
            stream.launch_builder(&fill).arg(&mut source).arg(&value).arg(&count).launch(grid).unwrap();
            stream.launch_builder(&read).arg(&source).arg(&mut target).arg(&count).launch(grid).unwrap();
        }
        assert!(stream.clone_dtoh(&target).unwrap() == vec![value; WORDS]);
        assert_eq!(module.load_function("absent").unwrap_err().0, CUresult::CUDA_ERROR_NOT_FOUND);
    });
}

#[test]
fn it_captures_and_launches_graphs() {
    on_the_library("bindings::it_captures_and_launches_graphs", false, || {
        let context = CudaContext::new(0).unwrap();
        // SAFETY: one stream does all the work. Events from before a capture would not go into it.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().unwrap();
        let source = stream.clone_htod(&words(2)).unwrap();
        let mut target = stream.alloc_zeros::<u32>(WORDS).unwrap();
        stream.synchronize().unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        stream.memcpy_dtod(&source, &mut target).unwrap();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
        assert!(stream.clone_dtoh(&target).unwrap() == vec![0; WORDS], "captured, not run");
        graph.launch().unwrap();
        assert!(stream.clone_dtoh(&target).unwrap() == words(2));
    });
}

#[test]
fn what_it_calls_beyond_the_list_is_not_supported() {
    on_the_library("bindings::what_it_calls_beyond_the_list_is_not_supported", true, || {
        let context = CudaContext::new(0).unwrap();
        assert!(context.has_async_alloc());
        let refused = context.default_stream().alloc_zeros::<u32>(WORDS).unwrap_err();
        assert_eq!(refused.0, CUresult::CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!(context.set_blocking_synchronize().unwrap_err().0, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    });
}
