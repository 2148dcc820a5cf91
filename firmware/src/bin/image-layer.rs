//! An image of `entries::layer` and nothing else.
#![cfg_attr(target_os = "none", no_std, no_main)]

attn_firmware::image!(attn_firmware::entries::layer);
