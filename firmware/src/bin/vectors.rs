//! The cases, with what they cost: run on every board and on the host, whose lines are compared.
#![cfg_attr(target_os = "none", no_std, no_main)]

attn_firmware::program!(run);

fn run() -> bool {
    attn_firmware::say!("clock {} {}", attn_firmware::board::CALIBRATION, attn_firmware::board::calibrate());
    attn_firmware::cases::run()
}
