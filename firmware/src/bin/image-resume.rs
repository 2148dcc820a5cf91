//! An image of `entries::resume` and nothing else.
#![cfg_attr(target_os = "none", no_std, no_main)]

attn_firmware::image!(attn_firmware::entries::resume);
