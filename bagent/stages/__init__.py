"""In which order do rows meet prompts? Topologies are short names for stages."""
