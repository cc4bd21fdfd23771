"""Assets that apply specs of journals and shards, and checks that find drift from them."""
